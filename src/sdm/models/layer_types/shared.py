"""Fields and formulas that several layer types share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from transformers import initialization as init

from sdm.layers import ShiftedKeys, SparseDeltaMemory
from sdm.layers.recurrent_layer import RecurrentLayer
from sdm.models.layer_types.base import LayerCost, check_sizes, derived

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig


@dataclass
class InitialStateFields:
    """Fields of memories that may start from learned content."""

    initial_state_std: float | int = 0.002
    """Scale of a learned initial state at initialisation. One write moves a slot by about 1 / num_writes of a value."""


@dataclass
class DecayFields:
    """Fields of the decay gate of SDM and GDN."""

    largest_decay_rate: float | int = 16.0
    """Decay rates A of SDM and GDN start uniform between 0 and this. 0.16 starts memories that forget slowly."""


@dataclass
class KeyAids:
    """Fields that help very small models to find keys, with SDM, GDN, DeltaNet, KDA or Raven. The paper's models use
    none of them."""

    shift_keys: bool = False
    """Take the keys of SDM, GDN, DeltaNet, KDA and Raven from the token before."""
    key_convolution: int = 0
    """Taps of a convolution in front of the keys of the same layers that starts as the token before; 0: none."""
    tie_query_initialization: bool = False
    """Initialise W_q of the same layers equal to W_k."""


@dataclass
class DenseMemoryFields:
    """Fields of memories that are a small matrix per head."""

    recurrent_key_dim: int | None = None
    """Key channels per head of GDN, DeltaNet, KDA and Mamba2 (its state size). Derived: head_dim / 2."""
    short_convolution: int = 4
    """Taps of the short convolutions of GDN, DeltaNet, KDA and Mamba2; 0 leaves those of the first three out."""
    shift_convolution: bool = False
    """Start the short convolutions of GDN, DeltaNet and KDA with the keys at the token before and the rest at the token
    itself. An aid for very small models, together with tie_query_initialization; no published model uses it."""


def derive_dense_memory(config: "SDMConfig") -> None:
    """Check `DenseMemoryFields` and fill in the key channels."""
    check_sizes(config, "recurrent_key_dim")
    if not isinstance(config.short_convolution, int) or config.short_convolution < 0:
        raise ValueError(f"short_convolution must be a number of taps, or 0, got {config.short_convolution!r}")
    if config.shift_convolution and config.short_convolution < 2:
        raise ValueError(
            "shift_convolution needs a short_convolution of at least 2 taps, to see the token before, got "
            f"{config.short_convolution}"
        )
    if config.recurrent_key_dim is None:
        config.recurrent_key_dim = derived(config.head_dim) // 2


def check_key_aids(config: "SDMConfig") -> None:
    """Raise unless `KeyAids` name one source of keys."""
    taps = config.key_convolution
    if not isinstance(taps, int) or isinstance(taps, bool) or taps < 0 or taps == 1:
        raise ValueError(f"key_convolution must be 0 or at least 2 taps, to see the token before, got {taps!r}")
    if taps and config.shift_keys:
        raise ValueError("key_convolution and shift_keys both say where keys come from; give one of them")


def shifted(layer: SparseDeltaMemory | RecurrentLayer, config: "SDMConfig") -> nn.Module:
    """Wrap a memory so that it takes its keys from earlier tokens, if the configuration asks for it."""
    return ShiftedKeys(layer, config.key_convolution) if config.shift_keys or config.key_convolution else layer


def shifted_state(config: "SDMConfig") -> int:
    """Count the state elements of the tokens that keys are taken from."""
    return config.hidden_size * (config.key_convolution - 1 if config.key_convolution else int(config.shift_keys))


def shifted_parameters(config: "SDMConfig") -> int:
    """Count the parameters of the convolution that keys are taken from."""
    return config.hidden_size * config.key_convolution


def tie_queries(layer: nn.Module, config: "SDMConfig") -> None:
    """Initialise the query projection equal to the key projection, if the configuration asks for it."""
    memory = layer.layer if isinstance(layer, ShiftedKeys) else layer
    if config.tie_query_initialization and isinstance(memory, (SparseDeltaMemory, RecurrentLayer)):
        init.copy_(memory.query_proj.weight, memory.key_proj.weight)


def delta_flops(written: int, read: int, channels: int) -> int:
    """Decay, retrieval, write and read of the delta rule; `beta * (v - retrieved)` is 2 per channel."""
    return channels * (5 * written + 2 * read + 2)


def delta_net_cost(kind: str, config: "SDMConfig", gates: int, memory_flops: int, vectors: int = 0) -> LayerCost:
    """Work out the cost of a dense delta rule that has `gates` scalar gates per head, and `vectors` more parameters."""
    width, heads, keys = config.hidden_size, derived(config.num_attention_heads), derived(config.recurrent_key_dim)
    channels, convolved = width // heads, width + 2 * heads * keys
    matrix = heads * keys * channels
    return LayerCost(
        kind,
        weights=3 * width * width + 2 * width * heads * keys + gates * width * heads,
        vectors=vectors + channels + convolved * config.short_convolution + shifted_parameters(config),
        state=matrix,
        convolution_state=convolved * max(0, config.short_convolution - 1) + shifted_state(config),
        state_moved=2 * matrix,
        memory_flops=memory_flops,
    )
