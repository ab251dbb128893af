"""What a model remembers is a thing of its own: save it, resume it, let a hundred futures grow from it."""

import tempfile
from pathlib import Path

import torch

import sdm

torch.manual_seed(0)
config = sdm.SDMConfig(vocab_size=97, hidden_size=64, num_hidden_layers=4, num_slots=4096, num_writes=16, num_reads=16)
model = sdm.SDMForCausalLM(config).eval()
prompt = torch.randint(0, 97, (1, 30))

# transformers' generate() works as it does for any model; it decodes in place on the cache.
print("generated", model.generate(prompt, max_new_tokens=8, do_sample=False)[0, 30:].tolist())

# Read the prompt once, and keep what the model remembers of it.
with torch.no_grad():
    cache = model(prompt, use_cache=True).past_key_values
state = sdm.MemoryState.from_cache(model, cache)
print("remembered", state, "of a table of", f"{sdm.cost(config).state_bytes():,} bytes")

# A file holds only the slots that the stream has changed, and continues exactly.
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "conversation.sdm"
    state.save(path)
    print("file", f"{path.stat().st_size:,} bytes")
    state = sdm.MemoryState.load(path, model)

# A hundred forks cost nothing until they change something.
forks = [state.fork() for _ in range(100)]
print("forks", sum(fork.nbytes for fork in forks), "bytes")

# Two of them hear different things. Which slots tell them apart?
with torch.no_grad():
    for place in (0, 1):
        working = forks[place].cache(model)
        model(torch.randint(0, 97, (1, 3)), past_key_values=working)
        forks[place] = sdm.MemoryState.from_cache(model, working)
for layer, changes in forks[0].diff(forks[1]).items():
    print(f"layer {layer}: {len(changes)} slots differ, by up to {changes.change.max():.4f}")
