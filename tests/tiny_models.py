"""Models small enough to test in milliseconds, with weights large enough for every layer to matter."""

from __future__ import annotations

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
