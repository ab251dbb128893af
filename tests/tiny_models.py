"""Models small enough to test in milliseconds, with weights large enough for every layer to matter."""

from __future__ import annotations

import math
from typing import Any

import torch

from sdm.models import SDMConfig, SDMForCausalLM
from sdm.models.layer_types import layer_names

VOCABULARY = 97

# Everything that a stack can be made of: each global layer type there is, and mixtures.
STACKS: dict[str, dict[str, Any]] = {
    **{name: {"global_layer": name} for name in layer_names("global")},
    "linear_attention": {"global_layer": "deltanet", "deltanet_correction": False},
    "mixed": {"global_layer": ["full_attention", "sdm"], "global_layer_interval": 2},
    "all_recurrent": {"layer_types": ["sdm", "gdn", "mamba2", "sdm"]},
    "shifted": {
        "layer_types": ["token_shift", "sdm", "gdn", "token_shift"],
        "shift_keys": True,
        "tie_query_initialization": True,
    },
    "convolved": {"layer_types": ["token_shift", "sdm", "gdn", "token_shift"], "key_convolution": 3},
}


def tiny_config(stack: str = "sdm", **fields: Any) -> SDMConfig:
    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "num_memory_heads": 2,
        "num_slots": 25,
        "pkm_slots": 25,
        "fwpkm_slots": 25,
        "fwpkm_reads": 4,
        "fwpkm_chunk": 4,
        "num_writes": 4,
        "num_reads": 6,
        "initial_state_std": 0.2,
        "initializer_range": 0.15,
    }
    return SDMConfig(**(defaults | STACKS[stack] | fields))


def tiny_model(stack: str = "sdm", **fields: Any) -> SDMForCausalLM:
    return SDMForCausalLM(tiny_config(stack, **fields)).eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape)


@torch.no_grad()
def recalling_model(vocabulary: int) -> SDMForCausalLM:
    """A model that recalls because its weights are put together so: it predicts what followed a token the last time.

    A token is a unit vector; each has a slot of its own. Keys come from the token before, so that every token is
    written, undecayed, into the slot of its predecessor, and the slot of the token itself is read.
    """
    width, side = 8 * -(-vocabulary // 8), math.isqrt(vocabulary - 1) + 1
    fields: dict[str, Any] = {
        "layer_types": ["sdm"],
        "num_hidden_layers": 1,
        "num_memory_heads": 1,
        "num_slots": side**2,
    }
    fields |= {"num_writes": 1, "num_reads": 1, "learned_initial_state": False, "shift_keys": True}
    model = tiny_model(vocab_size=vocabulary, hidden_size=width, intermediate_size=8, **fields)
    block, unit = model.model.layers[0], torch.eye(width)
    memory = block.mixer.layer
    for parameter in (*memory.parameters(), *block.mlp.parameters()):
        parameter.zero_()
    token = torch.arange(vocabulary)
    for proj in (memory.query_proj, memory.key_proj):
        proj.weight[token // side, token] = proj.weight[side + token % side, token] = 1.0
    memory.beta_proj.weight.fill_(10.0)  # beta = 1
    memory.decay_bias.fill_(-50.0)  # no decay
    memory.output_norm.weight.fill_(1.0)
    memory.value_proj.weight.copy_(unit)
    memory.out_proj.weight.copy_(4 * unit)  # what is read is louder than the token itself
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        weight.copy_(unit[:vocabulary])
    return model
