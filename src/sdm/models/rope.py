"""The rotary frequencies that a configuration asks for, by transformers' own functions.

Only types whose frequencies are fixed are taken. "dynamic" and "longrope" choose them by the length of the longest
stream at hand: the keys in a cache would no longer fit the queries behind them, one pass would differ from the same
tokens in pieces, and a row would depend on its batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sdm.layers.rope import Rope

# The keys that a type needs beside rope_theta, and those that it may have.
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "llama3": ({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}, set()),
}
# What every type may carry: the length trained on is of use to no type but those that need it.
_ALWAYS = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
ATTENTION = ("sliding_attention", "full_attention")


def rope_of(config: PreTrainedConfig, layer_type: str) -> Rope:
    """The rotary positions of the layers of this type."""
    parameters = _parameters(config)[layer_type]
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
    for name, parameters in _parameters(config).items():
        _check(name, parameters, config.default_theta)


def _parameters(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
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


def _check(layer_type: str, parameters: dict[str, Any], default_theta: float) -> None:
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = default_theta
    kind = parameters["rope_type"]
    if kind not in _KEYS:
        reason = ""
        if kind in ("dynamic", "longrope"):
            reason = (
                ': its frequencies change with the length of the stream, so that cached keys would not fit; "yarn" '
                "stretches positions by a fixed factor"
            )
        raise ValueError(f'rope_parameters["rope_type"] must be one of {tuple(_KEYS)}, got {kind!r}{reason}')
    required, optional = _KEYS[kind]
    for name in sorted(required - parameters.keys()):
        raise ValueError(f"rope_parameters of type {kind!r} needs {name!r}")
    for name in sorted(parameters.keys() - required - optional - _ALWAYS):
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
