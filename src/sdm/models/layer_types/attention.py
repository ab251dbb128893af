"""Sliding-window and full attention, and the rotary frequencies that a configuration asks for, by transformers' own
functions.

Only types whose frequencies are fixed are taken. "dynamic" and "longrope" choose them by the length of the longest
stream at hand: the keys in a cache would no longer fit the queries behind them, one pass would differ from the same
tokens in pieces, and a row would depend on its batch.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sdm.layers import FullAttention, SlidingWindowAttention
from sdm.layers.rope import Rope
from sdm.layers.sizes import default_kv_heads
from sdm.models.layer_types.base import LayerCost, LayerType, check_sizes, derived

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig

# The keys that a type of rotary positions needs beside rope_theta, and those that it may have.
_ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "llama3": ({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}, set()),
}
# What every type may carry: the length trained on is of use to no type but those that need it.
_ROPE_ALWAYS = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
ATTENTION = ("sliding_attention", "full_attention")


@dataclass
class WindowFields:
    """Fields of sliding-window attention."""

    sliding_window: int = 128
    """Tokens that sliding-window attention sees, the current one included."""


@dataclass
class FullAttentionFields:
    """Fields of full attention."""

    num_key_value_heads: int | None = None
    """Key-value heads of full attention. Derived: half of num_attention_heads, or the nearest number that divides
    them."""


class SlidingAttentionType(LayerType):
    """Sliding-window attention: a token sees the last `sliding_window` tokens."""

    name = "sliding_attention"
    scope = "local"
    fields = WindowFields
    state_fields = ("num_attention_heads", "sliding_window")

    def derive(self, config: "SDMConfig") -> None:
        """Check the fields of this layer type and fill in those that are None."""
        check_sizes(config, "sliding_window")

    def build(self, config: "SDMConfig") -> nn.Module:
        """Build the layer."""
        rope = rope_of(config, self.name)
        return SlidingWindowAttention(
            config.hidden_size, derived(config.num_attention_heads), config.sliding_window, rope=rope
        )

    def reach(self, config: "SDMConfig") -> int:
        """Number of earlier tokens that a token sees through this layer."""
        return config.sliding_window - 1

    def cost(self, config: "SDMConfig") -> LayerCost:
        """Work out the cost of one layer."""
        return _attention_cost(config, self.name, derived(config.num_attention_heads), config.sliding_window)


class FullAttentionType(LayerType):
    """Full attention: a token sees all tokens, whose keys and values are kept."""

    name = "full_attention"
    scope = "global"
    fields = FullAttentionFields
    state_fields = ("num_attention_heads", "num_key_value_heads")
    bounded_state = False

    def derive(self, config: "SDMConfig") -> None:
        """Check the fields of this layer type and fill in those that are None."""
        check_sizes(config, "num_key_value_heads")
        heads = derived(config.num_attention_heads)
        if config.num_key_value_heads is None:
            config.num_key_value_heads = default_kv_heads(heads)
        elif heads % config.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {heads} must be divisible by num_key_value_heads = {config.num_key_value_heads}"
            )

    def build(self, config: "SDMConfig") -> nn.Module:
        """Build the layer."""
        rope = rope_of(config, self.name)
        return FullAttention(
            config.hidden_size, derived(config.num_attention_heads), config.num_key_value_heads, rope=rope
        )

    def cost(self, config: "SDMConfig") -> LayerCost:
        """Work out the cost of one layer."""
        return _attention_cost(config, self.name, derived(config.num_key_value_heads), None)


def _attention_cost(config: "SDMConfig", kind: str, kv_heads: int, window: int | None) -> LayerCost:
    width, kv_size = config.hidden_size, kv_heads * derived(config.head_dim)
    return LayerCost(
        kind,
        weights=3 * width * width + 2 * width * kv_size,
        vectors=0,
        cached_per_token=2 * kv_size,
        window=window,
        attention_flops_per_token=4 * width,
    )


def rope_of(config: PreTrainedConfig, layer_type: str) -> Rope:
    """The rotary positions of the layers of this type."""
    parameters = _rope_parameters(config)[layer_type]
    kind, theta = parameters["rope_type"], float(parameters["rope_theta"])
    if kind == "default":
        return Rope(theta)
    nested = config.nested_rope_parameter_keys(config.rope_parameters)
    # Models are also built on the meta device, which has no numbers.
    with torch.device("cpu"):
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, layer_type=layer_type if nested else None)
    return Rope(theta, tuple(frequencies.tolist()), float(scale))


def check_rope(config: PreTrainedConfig) -> None:
    """Fill in the base and the type, and raise unless every attention layer has usable parameters."""
    for name, parameters in _rope_parameters(config).items():
        _check_rope_type(name, parameters, config.default_theta)


def _rope_parameters(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """The parameters of each type of attention layer; one dictionary serves both unless they are nested."""
    if not config.rope_parameters:
        config.rope_parameters = {"rope_theta": config.default_theta}
    parameters = config.rope_parameters
    nested = config.nested_rope_parameter_keys(parameters)
    config.standardize_rope_params()
    if not nested:
        return dict.fromkeys(ATTENTION, parameters)
    for name in set(config.layer_types or ()) & set(ATTENTION):
        if not isinstance(parameters.get(name), dict):
            raise ValueError(f"rope_parameters has entries for {sorted(nested)}, but none for {name!r}")
    if foreign := parameters.keys() - set(ATTENTION):
        raise ValueError(f"rope_parameters is nested by layer type and has other entries: {sorted(foreign)}")
    return {name: parameters[name] for name in nested}


def _check_rope_type(layer_type: str, parameters: dict[str, Any], default_theta: float) -> None:
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = default_theta
    kind = parameters["rope_type"]
    if kind not in _ROPE_KEYS:
        reason = ""
        if kind in ("dynamic", "longrope"):
            reason = (
                ': its frequencies change with the length of the stream, so that cached keys would not fit; "yarn" '
                "stretches positions by a fixed factor"
            )
        raise ValueError(f'rope_parameters["rope_type"] must be one of {tuple(_ROPE_KEYS)}, got {kind!r}{reason}')
    required, optional = _ROPE_KEYS[kind]
    for name in sorted(required - parameters.keys()):
        raise ValueError(f"rope_parameters of type {kind!r} needs {name!r}")
    for name in sorted(parameters.keys() - required - optional - _ROPE_ALWAYS):
        raise ValueError(
            f"rope_parameters of type {kind!r} has no {name!r}; it takes {sorted(required | optional | {'rope_theta'})}"
        )
    for name, value in parameters.items():
        if name in ("rope_type", "type", "truncate") or (value is None and name in optional):
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f'rope_parameters["{name}"] of {layer_type} must be a positive number, got {value!r}')
    if parameters.get("factor", 1.0) < 1:
        raise ValueError(f'rope_parameters["factor"] must be at least 1, got {parameters["factor"]}')
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if (parameters.get(low) or 1) >= (parameters.get(high) or 32):
            raise ValueError(f'rope_parameters["{high}"] must be greater than rope_parameters["{low}"]')
