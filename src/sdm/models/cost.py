"""What a model costs: parameters, state, FLOPs and bytes per token, worked out from its configuration alone; and the
paper's ladder of configurations.

Costs per token are those of decoding one token behind `context` tokens, which is also what the token at that place of
a training sequence costs in the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sdm.models.configuration import SDMConfig
from sdm.models.layer_types import LAYER_TYPES
from sdm.models.layer_types.base import Flops, LayerCost


@dataclass(frozen=True)
class Cost:
    """The costs of a model. See `sdm.cost`."""

    parameters: int  # all but learned initial states, which the paper counts as state
    non_embedding_parameters: int  # without embedding and output projection
    initial_state_parameters: int  # elements of learned initial states
    state_elements: int  # recurrent state of the global layers, all heads and layers; attention's grows instead
    kv_elements_per_token: int  # keys and values that full attention adds per token
    window_elements: int  # keys and values that sliding-window attention keeps
    layers: tuple[LayerCost, ...]
    mlp_weights: int  # of one block
    head_weights: int
    hidden_size: int

    def state_elements_at(self, context: int) -> int:
        """Elements of everything that is kept behind `context` tokens."""
        _check_context(context)
        return sum(layer.state_elements(context) for layer in self.layers)

    def state_bytes(self, dtype: torch.dtype = torch.float32, context: int | None = None) -> int:
        """Bytes of `state_elements`; with a context, of everything that is kept behind so many tokens."""
        elements = self.state_elements if context is None else self.state_elements_at(context)
        return elements * dtype.itemsize

    def flops_per_token(self, context: int = 0) -> Flops:
        """The forward pass of one token behind `context` tokens."""
        _check_context(context)
        total = Flops(2 * (self.mlp_weights * len(self.layers) + self.head_weights))
        for layer in self.layers:
            total += layer.flops(context)
        return total

    def training_flops_per_token(self, length: int) -> int:
        """Forward and backward of a token, on average over a sequence of `length` tokens: three forward passes."""
        if length < 1:
            raise ValueError(f"length must be positive, got {length}")
        forward = self.flops_per_token(0).total
        for layer in self.layers:
            seen = sum(layer.cached_tokens(place) for place in (length, 1)) / 2
            if layer.window is not None and length > layer.window:
                ramp = layer.window * (layer.window + 1) // 2
                seen = (ramp + (length - layer.window) * layer.window) / length
            forward += round(layer.attention_flops_per_token * (seen - 1))
        return 3 * forward

    def bytes_per_token(
        self, context: int = 0, dtype: torch.dtype = torch.bfloat16, state_dtype: torch.dtype = torch.float32
    ) -> int:
        """Bytes that decoding one token of one stream moves: every weight once, one embedding row, and the state.

        Args:
            dtype: of the weights, keys and values.
            state_dtype: of recurrent states.
        """
        _check_context(context)
        weights = sum(layer.parameters - layer.table for layer in self.layers) + self.mlp_weights * len(self.layers)
        weights += self.head_weights + self.hidden_size * (2 + 2 * len(self.layers))
        moved = weights * dtype.itemsize
        for layer in self.layers:
            itemsize = dtype.itemsize if layer.cached_per_token else state_dtype.itemsize
            moved += layer.state_elements_moved(context) * itemsize
        return moved


def cost(config: SDMConfig) -> Cost:
    """Parameters, state, FLOPs and bytes per token of the model that `config` describes, without building it."""
    width = config.hidden_size
    layers = tuple(LAYER_TYPES[kind].cost(config) for kind in config.layer_types or ())
    mlp = 3 * width * (config.intermediate_size or 0)
    norms = width * (2 * len(layers) + 1)
    inner = sum(layer.parameters for layer in layers) + mlp * len(layers) + norms
    embedding = config.vocab_size * width
    return Cost(
        parameters=inner + embedding * (1 if config.tie_word_embeddings else 2),
        non_embedding_parameters=inner,
        initial_state_parameters=sum(layer.initial_state for layer in layers),
        state_elements=sum(layer.state for layer in layers),
        kv_elements_per_token=sum(layer.cached_per_token for layer in layers if layer.window is None),
        window_elements=sum(layer.cached_per_token * layer.window for layer in layers if layer.window is not None),
        layers=layers,
        mlp_weights=mlp,
        head_weights=embedding,
        hidden_size=width,
    )


def session_bytes(config: SDMConfig, tokens: int) -> int:
    """Bytes that an `sdm.Session` of float32 owns behind `tokens` tokens at most.

    A sparse memory takes a map of 4 bytes per slot, and the rows that were written: num_writes per token and head, or
    all. Other layers take their whole state. Rows that are written again, or shared with a fork, make it less.
    """
    _check_context(tokens)
    total = 0
    for kind, layer in zip(config.layer_types or (), cost(config).layers, strict=True):
        if kind == "sdm":
            heads, slots, writes = config.num_memory_heads, config.num_slots or 0, config.num_writes or 0
            rows = heads * min(slots, tokens * writes)
            total += 4 * (rows * (config.hidden_size // heads) + heads * slots + layer.convolution_state)
        else:
            total += 4 * layer.state_elements(max(tokens, layer.window or 0))  # a window's buffer is always whole
            total += 8 * bool(layer.cached_per_token)  # the position
    return total


def _check_context(context: int) -> None:
    if context < 0:
        raise ValueError(f"context must not be negative, got {context}")


@dataclass(frozen=True)
class Level:
    """One row of the paper's table "Scaling ladder configurations"."""

    hidden_size: int
    num_hidden_layers: int
    num_memory_heads: int
    paper_parameters: str
    paper_gdn_state: str
    paper_sdm_state: str
    tokens: float  # of training
    learning_rate: float


LEVELS = {
    1: Level(768, 9, 1, "257M", "98k", "57M", 10.7e9, 1.78e-3),
    2: Level(768, 11, 1, "280M", "98k", "57M", 14.9e9, 1.50e-3),
    3: Level(1024, 11, 1, "407M", "131k", "134M", 24.3e9, 1.35e-3),
    4: Level(1024, 14, 1, "465M", "197k", "201M", 34.0e9, 1.24e-3),
    5: Level(1280, 14, 1, "658M", "246k", "393M", 52.8e9, 1.20e-3),
    6: Level(1536, 15, 1, "847M", "295k", "679M", 81.0e9, 0.99e-3),
    8: Level(1920, 21, 2, "1.48B", "614k", "553M", 168.4e9, 0.87e-3),
    13: Level(3840, 38, 2, "8.14B", "2.2M", "7.963B", 1.141e12, 0.50e-3),
}

# Levels at which the table's parameters, and with them its ratio of state to parameters, are those of one layer less
# than its number of layers.
ONE_LAYER_LESS = (1, 3)


def ladder(level: int, global_layer: str | list[str] = "sdm", **overrides: object) -> SDMConfig:
    """The configuration of a level of the paper's ladder (1-6, 8, 13).

    Args:
        level: the row of the table.
        global_layer: as in `SDMConfig`; everything else stays the same, so that models can be compared.
        overrides: other fields of `SDMConfig`.

    The number of layers is the table's; at levels 1 and 3 the table's number of parameters is that of one layer less.
    Full attention has half as many key-value heads as heads, which 15 heads do not allow: level 8 has 5, a group of 3.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(map(str, LEVELS))}, got {level!r}")
    row = LEVELS[level]
    fields: dict[str, Any] = {
        "vocab_size": 128_256,
        "hidden_size": row.hidden_size,
        "num_hidden_layers": row.num_hidden_layers,
        "global_layer": global_layer,
        "num_memory_heads": row.num_memory_heads,
        "head_dim": 128,
        "intermediate_multiple": 1024,
        **overrides,
    }
    return SDMConfig(**fields)
