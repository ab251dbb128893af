"""Fields and formulas that several layer types share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import initialization as init

from sdm.layers import ShiftedKeys
from sdm.models.layer_types.base import check_sizes


@dataclass(frozen=True)
class InitialStateFields:
    """Of memories that may start from learned content."""

    initial_state_std: float | int = 0.002
    """Scale of a learned initial state at initialisation. One write moves a slot by about 1 / num_writes of a value."""


@dataclass(frozen=True)
class KeyAids:
    """Help for very small models, of SDM and GDN. The paper's models have none of it."""

    shift_keys: bool = False
    """Take the keys of SDM and GDN from the token before."""
    key_convolution: int = 0
    """Taps of a convolution in front of the keys of SDM and GDN that starts as the token before; 0: none."""
    tie_query_initialization: bool = False
    """Initialise W_q of SDM and GDN equal to W_k."""


@dataclass(frozen=True)
class DenseMemoryFields:
    """Of memories that are a small matrix per head."""

    recurrent_key_dim: int | None = None
    """Key channels per head of GDN, DeltaNet and Mamba2 (its state size). Derived: head_dim / 2."""
    short_convolution: int = 4
    """Taps of the short convolutions of GDN, DeltaNet and Mamba2; 0 leaves the first two's out."""


def derive_dense_memory(config: Any) -> None:
    check_sizes(config, "recurrent_key_dim")
    if not isinstance(config.short_convolution, int) or config.short_convolution < 0:
        raise ValueError(f"short_convolution must be a number of taps, or 0, got {config.short_convolution!r}")
    if config.recurrent_key_dim is None:
        config.recurrent_key_dim = config.head_dim // 2


def check_key_aids(config: Any) -> None:
    taps = config.key_convolution
    if not isinstance(taps, int) or isinstance(taps, bool) or taps < 0 or taps == 1:
        raise ValueError(f"key_convolution must be 0 or at least 2 taps, to see the token before, got {taps!r}")
    if taps and config.shift_keys:
        raise ValueError("key_convolution and shift_keys both say where keys come from; give one of them")


def shifted(layer: Any, config: Any) -> nn.Module:
    return ShiftedKeys(layer, config.key_convolution) if config.shift_keys or config.key_convolution else layer


def shifted_state(config: Any) -> int:
    """Elements of the last tokens, where keys are taken from them."""
    return config.hidden_size * (config.key_convolution - 1 if config.key_convolution else int(config.shift_keys))


def shifted_parameters(config: Any) -> int:
    """Of the convolution that keys are taken from."""
    return config.hidden_size * config.key_convolution


def tie_queries(layer: Any, config: Any) -> None:
    if config.tie_query_initialization:
        memory = getattr(layer, "layer", layer)
        init.copy_(memory.query_proj.weight, memory.key_proj.weight)


def delta_flops(written: int, read: int, channels: int) -> int:
    """Decay, retrieval, write and read of the delta rule; `beta * (v - retrieved)` is 2 per channel."""
    return channels * (5 * written + 2 * read + 2)
