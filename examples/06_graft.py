"""Give a transformer with a short window a long memory: graft, train, save, load, generate."""

import tempfile

import torch
from transformers import MistralConfig, MistralForCausalLM

import sdm

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
base = MistralForCausalLM(MistralConfig(vocab_size=256, num_key_value_heads=4, sliding_window=8, **sizes))
model = sdm.graft(base, freeze_base=False)  # this base is random; of a pretrained one, train the memory only
optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=3e-3)
for _ in range(250):
    ids = torch.rand(8, 256).argsort(1)[:, :32].repeat(1, 2)  # to be repeated from beyond the window
    loss = torch.nn.functional.cross_entropy(model(ids).logits[:, 32:-1].flatten(0, 1), ids[:, 33:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(folder := tempfile.mkdtemp())
loaded = sdm.load_grafted(folder).eval()
prompt = torch.randperm(256)[None, :32].repeat(1, 2)[:, :40]
repeated = loaded.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
print(f"loss {loss.item():.2f}, repeated {int((repeated[0, 40:] == prompt[0, 8:32]).sum())} of 24 tokens")
