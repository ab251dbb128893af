"""What a model costs: parameters, state, FLOPs and bytes per token, worked out from its configuration alone.

A multiply-add is two FLOPs. Norms, activations, rotary embeddings and short convolutions are left out: they are below
one percent.
Costs per token are those of decoding one token behind `context` tokens, which is also what the token at that place of
a training sequence costs in the forward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sdm.models.configuration import SDMConfig


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token."""

    projections: int  # products with weight matrices, MLP and output projection included
    memory: int = 0  # writing and reading a recurrent state
    addressing: int = 0  # choosing the slots to write and read
    attention: int = 0  # scores and weighted sums over cached keys and values

    @property
    def total(self) -> int:
        return self.projections + self.memory + self.addressing + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.projections + other.projections,
            self.memory + other.memory,
            self.addressing + other.addressing,
            self.attention + other.attention,
        )


@dataclass(frozen=True)
class LayerCost:
    """One sequence layer, its MLP not included."""

    kind: str
    weights: int  # elements of the matrices that every token is multiplied with
    vectors: int  # other parameters: norms, decay rates, convolutions, biases
    initial_state: int = 0  # elements of a learned initial state
    state: int = 0  # elements of the recurrent state
    convolution_state: int = 0  # elements that short convolutions and shifts keep
    cached_per_token: int = 0  # key and value elements that a token adds
    window: int | None = None  # how many tokens' keys and values are kept; None: all
    state_moved: int = 0  # elements of the recurrent state read and written per token
    memory_flops: int = 0
    addressing_flops: int = 0
    attention_flops_per_token: int = 0  # per token looked at

    @property
    def parameters(self) -> int:
        return self.weights + self.vectors

    def cached_tokens(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)

    def state_elements(self, context: int) -> int:
        """Everything that the layer keeps behind `context` tokens."""
        return self.state + self.convolution_state + self.cached_per_token * self.cached_tokens(context)

    def flops(self, context: int) -> Flops:
        attention = self.attention_flops_per_token * self.cached_tokens(context + 1)
        return Flops(2 * self.weights, self.memory_flops, self.addressing_flops, attention)

    def state_elements_moved(self, context: int) -> int:
        """State elements read or written for one token: old keys and values are read, the new ones written."""
        kept = self.cached_tokens(context) + 1 if self.cached_per_token else 0
        return self.state_moved + 2 * self.convolution_state + self.cached_per_token * kept


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
        weights = sum(layer.parameters for layer in self.layers) + self.mlp_weights * len(self.layers)
        weights += self.head_weights + self.hidden_size * (2 + 2 * len(self.layers))
        moved = weights * dtype.itemsize
        for layer in self.layers:
            itemsize = dtype.itemsize if layer.cached_per_token else state_dtype.itemsize
            moved += layer.state_elements_moved(context) * itemsize
        return moved


def cost(config: SDMConfig) -> Cost:
    """Parameters, state, FLOPs and bytes per token of the model that `config` describes, without building it."""
    width = config.hidden_size
    layers = tuple(layer_cost(config, kind) for kind in config.layer_types or ())
    mlp = 3 * width * _size(config.intermediate_size)
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


def layer_cost(config: SDMConfig, kind: str) -> LayerCost:
    """The cost of one sequence layer of this kind."""
    return _LAYERS[kind](config)


def _attention(config: SDMConfig, kind: str, kv_heads: int, window: int | None) -> LayerCost:
    width, head_dim = config.hidden_size, _size(config.head_dim)
    kv_size = kv_heads * head_dim
    return LayerCost(
        kind,
        weights=3 * width * width + 2 * width * kv_size,
        vectors=0,
        cached_per_token=2 * kv_size,
        window=window,
        attention_flops_per_token=4 * width,
    )


def _sliding_attention(config: SDMConfig) -> LayerCost:
    return _attention(config, "sliding_attention", _size(config.num_attention_heads), config.sliding_window)


def _token_shift(config: SDMConfig) -> LayerCost:
    width = config.hidden_size
    return LayerCost("token_shift", weights=2 * width * width, vectors=0, convolution_state=width)


def _full_attention(config: SDMConfig) -> LayerCost:
    return _attention(config, "full_attention", _size(config.num_key_value_heads), None)


def _sdm(config: SDMConfig) -> LayerCost:
    width, heads, slots = config.hidden_size, config.num_memory_heads, _size(config.num_slots)
    writes, reads = _size(config.num_writes), _size(config.num_reads)
    channels, side = width // heads, math.isqrt(slots)
    vectors = 2 * heads + channels
    if config.normalize_scores:
        vectors += 2 * side
    if config.query_batch_norm:
        vectors += 4 * heads * side
    table = heads * slots * channels
    return LayerCost(
        "sdm",
        weights=3 * width * width + 4 * width * heads * side + 2 * width * heads,
        vectors=vectors,
        initial_state=table if config.learned_initial_state else 0,
        state=table,
        convolution_state=_shifted(config),
        state_moved=heads * channels * (2 * writes + reads),
        memory_flops=heads * _delta_flops(writes, reads, channels),
        addressing_flops=heads * (_selection_flops(side, writes) + _selection_flops(side, reads)),
    )


def _gdn(config: SDMConfig) -> LayerCost:
    width, heads, keys = config.hidden_size, _size(config.num_attention_heads), _size(config.recurrent_key_dim)
    channels = width // heads
    convolved = width + 2 * heads * keys
    matrix = heads * keys * channels
    return LayerCost(
        "gdn",
        weights=3 * width * width + 2 * width * heads * keys + 2 * width * heads,
        vectors=2 * heads + channels + convolved * config.short_convolution,
        initial_state=matrix if config.gdn_learned_initial_state else 0,
        state=matrix,
        convolution_state=convolved * max(0, config.short_convolution - 1) + _shifted(config),
        state_moved=2 * matrix,
        memory_flops=heads * _delta_flops(keys, keys, channels),
    )


def _mamba2(config: SDMConfig) -> LayerCost:
    width, heads, keys = config.hidden_size, _size(config.num_attention_heads), _size(config.recurrent_key_dim)
    channels = width // heads
    convolved = width + 2 * heads * keys
    matrix = heads * keys * channels
    return LayerCost(
        "mamba2",
        weights=3 * width * width + 2 * width * heads * keys + width * heads,
        vectors=3 * heads + width + convolved * (config.short_convolution + 1),
        state=matrix,
        convolution_state=convolved * (config.short_convolution - 1),
        state_moved=2 * matrix,
        # Decay, write and read; the step size times the value, and the value that skips the memory.
        memory_flops=heads * channels * (5 * keys + 3),
    )


def _shifted(config: SDMConfig) -> int:
    """The last token, where keys are taken from it."""
    return config.hidden_size if config.shift_keys else 0


def _delta_flops(written: int, read: int, channels: int) -> int:
    """Decay, retrieval, write and read of the delta rule; `beta * (v - retrieved)` is 2 per channel."""
    return channels * (5 * written + 2 * read + 2)


@functools.cache
def _selection_flops(side: int, count: int) -> int:
    """Comparisons and additions of a product-key selection, and the softmax over what it selects.

    Each half is looked at once; of its best, only the pairs (a, b) with (a + 1)(b + 1) <= count can be chosen.
    """
    best = min(count, side)
    pairs = sum(min(best, count // (a + 1)) for a in range(best))
    return 2 * side + 2 * pairs + 3 * count


_LAYERS: dict[str, Callable[[SDMConfig], LayerCost]] = {
    "sliding_attention": _sliding_attention,
    "token_shift": _token_shift,
    "full_attention": _full_attention,
    "sdm": _sdm,
    "gdn": _gdn,
    "mamba2": _mamba2,
}


def _size(value: int | None) -> int:
    """A field that the configuration has derived."""
    assert value is not None
    return value


def _check_context(context: int) -> None:
    if context < 0:
        raise ValueError(f"context must not be negative, got {context}")
