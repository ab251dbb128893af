"""One layer by itself: whole, in pieces and token by token it computes the same."""

import torch

import sdm

torch.manual_seed(0)
layer = sdm.SparseDeltaMemory(hidden_size=64, num_heads=1, num_slots=1024, num_writes=16, num_reads=16)
x = torch.randn(2, 100, 64)

# The whole sequence at once. The state is a table of 1024 slots per sequence.
y, state = layer(x, return_state=True)
print("output", tuple(y.shape), "state", tuple(state.memory.shape))

# In two pieces: the state goes in and comes out.
first, middle = layer(x[:, :60], return_state=True)
second = layer(x[:, 60:], state=middle)
pieces = torch.cat([first, second], dim=1)
print("pieces differ by", (pieces - y).abs().max().item())

# Token by token: `step_` updates the state in place, and only the slots that the token writes.
with torch.no_grad():
    memory = layer.start_state(batch_size=2)
    steps = torch.stack([layer.step_(token, memory) for token in x.unbind(1)], dim=1)
print("steps differ by", (steps - y).abs().max().item())

# It trains like any other module. The initial state is learned too.
y.square().mean().backward()
print("gradient of the initial state", tuple(layer.initial_state.grad.shape))
