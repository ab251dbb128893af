"""A hybrid language model: change its global layer by one field, count what it costs, train it for a moment."""

import torch

import sdm

# Three layers of sliding-window attention to one global layer; everything else follows from these four fields.
fields = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "sliding_window": 16}
for kind in ("sdm", "gdn", "mamba2", "full_attention"):
    costs = sdm.cost(sdm.SDMConfig(**fields, global_layer=kind))
    flops = costs.flops_per_token(context=4096)
    print(f"{kind:15} parameters {costs.parameters:,}  state {costs.state_elements:,}  FLOPs/token {flops.total:,}")

# The paper's models are configurations of the same class.
print("level 8 has", f"{sdm.cost(sdm.ladder(8)).parameters:,}", "parameters")

# A sequence that repeats itself can be learned by heart.
torch.manual_seed(0)
model = sdm.SDMForCausalLM(sdm.SDMConfig(**fields, global_layer="sdm"))
ids = torch.randint(0, 97, (1, 40)).repeat(1, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(20):
    loss = model(ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step:2} loss {loss.item():.3f}")
