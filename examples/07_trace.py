"""Which earlier tokens does each token read, and what would the model say without them?"""

import torch

import sdm

torch.manual_seed(0)
config = sdm.SDMConfig(
    vocab_size=256, hidden_size=64, num_hidden_layers=2, layer_types=["sliding_attention", "sdm"], sliding_window=8
)
model = sdm.SDMForCausalLM(config).eval()
input_ids = torch.randint(0, 256, (40,))

trace = sdm.analysis.trace(model, input_ids)
memory = trace.layer(1)
print(f"the parts of its readings add up, to {memory.error:.0e} of the largest one")
for source, weight in memory.sources(token=39, most=3):
    print(f"token 39 reads token {source} with the weight {weight:+.4f}")
print(f"{float(memory.before_share()[39].mean()):.0%} of what it reads is the learned initial state")

source = next(place for place, _ in memory.sources(token=39) if place < 39)
for name, remove in (("masked", sdm.analysis.mask_writes), ("forgotten", sdm.analysis.forget_tokens)):
    removed = remove(model, input_ids, [source])
    print(f"token {source} {name}: the prediction changes by {float(removed.change[0]):.1e} nats")
