"""What a layer's readings consist of: the state it started from, and what each earlier token added.

Every mixer of this package reads a weighted sum::

    readings[t] = before[t] + sum_{l <= t} S[t,l] delta[l]

For a sparse delta memory, a gated delta net and Mamba2, delta is what a token writes, S the map of
`sdm.ops.sparse_delta_map`, and `before` what is left of the initial state. For attention, delta is the value, S the
attention weights, and `before` the part of keys and values that came with the state.

Shapes: B batch, T time, P keys before the first token, H heads, G key-value heads, K key channels, D value channels.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sdm.layers.attention import GatedAttention, KeyValueState
from sdm.layers.full_attention import FullAttention
from sdm.layers.gated_delta_net import GatedDeltaNet
from sdm.layers.interface import streams_of
from sdm.layers.mamba2 import Mamba2
from sdm.layers.shifted_keys import ShiftedKeys, ShiftedState
from sdm.layers.sliding_window_attention import SlidingWindowAttention, unroll
from sdm.layers.sparse_delta_memory import MemoryTable, SparseDeltaMemory
from sdm.layers.state import LayerState, RecurrentState
from sdm.ops.sparse_delta_map import ReadMap, sparse_delta_map, sparse_delta_writes
from sdm.ops.sparse_delta_map.inputs import sparse_map
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.ops.state_space import state_space


@dataclass(frozen=True, eq=False)
class Reads:
    """The readings of one layer, taken apart. Padding reads and writes nothing."""

    read_map: ReadMap
    """S of every batch row and head."""
    delta: Tensor
    """[B,T,H,D] what each token adds."""
    before: Tensor
    """[B,T,H,D] the part of the readings that comes from the state before the first token."""
    readings: Tensor
    """[B,T,H,D] as the layer computes them, before its norm, gate and output projection."""
    tokens: Tokens | None = None
    """Addresses, gates and values of a memory; None for attention."""
    initial_state: Tensor | None = None
    """[B,H,N,D] the table of a memory before the first token; None for attention."""
    update: str = ""
    """How a memory writes: "delta", "slot", or "add" for a rule that does not look at what its key held before."""
    gates: dict[str, Tensor] = field(default_factory=dict)
    """[B,T,H] "input" (beta) and "forget" (the factor by which a token's slots decay) of a memory."""
    past_weight: Tensor | None = None
    """[B,H,T,P] attention weights of the keys that came with the state; None for a memory."""
    past_position: Tensor | None = None
    """[B,P] positions of these keys in their streams, without padding; negative where there is no key."""

    def error(self) -> float:
        """The largest deviation of `before + S delta` from the readings, relative to the largest reading.

        S is the same for all value channels, so that a large layer is checked on a few random mixtures of them.
        """
        parts, readings, delta = self.before.double(), self.readings.double(), self.delta.double()
        channels = delta.shape[-1]
        if self.read_map.weight.numel() * channels > 50_000_000:
            generator = torch.Generator().manual_seed(0)
            mixture = torch.randn(channels, 8, generator=generator, dtype=torch.float64) / channels**0.5
            parts, readings, delta = (x.cpu() @ mixture for x in (parts, readings, delta))
        if not readings.numel():
            return 0.0
        return relative_deviation(parts.cpu() + self.read_map.apply(delta.cpu()), readings.cpu())


def relative_deviation(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest number of the expected one."""
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny))


@torch.no_grad()
def layer_reads(
    layer: nn.Module,
    x: Tensor,
    state: LayerState | None = None,
    attention_mask: Tensor | None = None,
    *,
    threshold: float = 0.0,
    key_input: Tensor | None = None,
) -> Reads:
    """Take the readings of a layer apart.

    Args:
        layer: SparseDeltaMemory, GatedDeltaNet, Mamba2, FullAttention, SlidingWindowAttention, or ShiftedKeys around
            one.
        x: [B,T,hidden_size], what the layer is given.
        state: its state before the first token; None starts anew. It is not changed.
        attention_mask: [B,T], zero or False on padding.
        threshold: leave out the pairs below this share of their row's mass.
        key_input: [B,T,hidden_size], what keys are projected from instead of x.

    Raises:
        TypeError: for a layer that does not read a weighted sum of earlier tokens.
    """
    if isinstance(layer, ShiftedKeys):
        assert state is None or isinstance(state, ShiftedState)
        streams = streams_of(x, attention_mask, None)
        shifted, _ = layer.key_input(streams.align(x), None if state is None else state.previous, streams)
        inner = None if state is None else state.inner
        return layer_reads(
            layer.layer, x, inner, attention_mask, threshold=threshold, key_input=streams.restore(shifted)
        )
    if isinstance(layer, SparseDeltaMemory):
        return _sparse_memory_reads(layer, x, state, attention_mask, key_input, threshold)
    if isinstance(layer, GatedDeltaNet | Mamba2):
        return _dense_memory_reads(layer, x, state, attention_mask, key_input, threshold)
    if isinstance(layer, GatedAttention):
        return _attention_reads(layer, x, state, attention_mask, threshold)
    raise TypeError(f"{type(layer).__name__} does not read a weighted sum of earlier tokens, so it has no map")


def has_reads(layer: nn.Module) -> bool:
    """Whether `layer_reads` can take the readings of this layer apart."""
    if isinstance(layer, ShiftedKeys):
        return has_reads(layer.layer)
    return isinstance(layer, SparseDeltaMemory | GatedDeltaNet | Mamba2 | GatedAttention)


def _sparse_memory_reads(
    layer: SparseDeltaMemory,
    x: Tensor,
    state: LayerState | None,
    attention_mask: Tensor | None,
    key_input: Tensor | None,
    threshold: float,
) -> Reads:
    assert state is None or isinstance(state, MemoryTable)
    mask = None if attention_mask is None else attention_mask != 0
    if mask is not None:
        x = x.masked_fill(~mask.unsqueeze(-1), 0)
        key_input = None if key_input is None else key_input.masked_fill(~mask.unsqueeze(-1), 0)
    tokens = layer._tokens(x, layer._for_channels(x), mask, key_input)
    table = (layer.start_state(len(x)) if state is None else state).memory
    return memory_reads(tokens, table, layer.update, mask, threshold, layer.backend)


def _dense_memory_reads(
    layer: GatedDeltaNet | Mamba2,
    x: Tensor,
    state: LayerState | None,
    attention_mask: Tensor | None,
    key_input: Tensor | None,
    threshold: float,
) -> Reads:
    """Take a dense memory apart: it is a sparse one of K slots that every token writes and reads all."""
    assert state is None or isinstance(state, RecurrentState)
    streams = streams_of(x, attention_mask, None)
    aligned = streams.align(x)
    projected = layer._project(aligned, None if key_input is None else streams.align(key_input))
    if layer.conv is not None:
        projected, _ = layer.conv(projected, None if state is None else state.tail, streams)
    beta, log_decay = layer._gates(aligned, streams.valid(x.shape[1]))
    query, key, value, beta, log_decay = (
        streams.restore(part.flatten(2)).view_as(part) for part in (*layer._heads(projected), beta, log_decay)
    )
    slots = torch.arange(layer.key_dim, device=x.device).expand_as(key)
    tokens = Tokens(slots, key, value, beta, log_decay, slots, query)
    table = (layer.start_state(len(x)) if state is None else state).memory
    mask = None if attention_mask is None else attention_mask != 0
    # Without the correction, and in Mamba2, a write adds its value whatever its key held before.
    update = "delta" if isinstance(layer, GatedDeltaNet) and layer.correction else "add"
    return memory_reads(tokens, table, update, mask, threshold)


@torch.no_grad()
def in_float64(reads: Reads) -> Reads:
    """Take the readings of a memory apart again in float64, from the same addresses, gates and values.

    In float32 both the layer and its parts round at every write; over thousands of writes to the same slots their sums
    differ by more than the parts are off.
    """
    assert reads.tokens is not None
    assert reads.initial_state is not None
    return memory_reads(reads.tokens.to(torch.float64), reads.initial_state.double(), reads.update)


def memory_reads(
    tokens: Tokens,
    table: Tensor,
    update: str = "delta",
    mask: Tensor | None = None,
    threshold: float = 0.0,
    backend: str = "auto",
) -> Reads:
    """Take the readings of a memory apart.

    Args:
        tokens: what the memory is told about each token, [B,T,H,...].
        table: [B,H,N,D] the memory before the first token.
        update: "delta" or "slot"; or "add", a write that does not look at what its key held before, of tokens that
            write and read all slots.
        mask: [B,T] booleans, False on padding.
        threshold: leave out the pairs below this share of their row's mass.
        backend: of `sdm.ops.sparse_delta_rule`.
    """
    if mask is not None:  # padding reads nothing, and nobody reads it
        tokens = tokens._replace(
            read_weight=tokens.read_weight * mask[..., None, None],
            write_weight=tokens.write_weight * mask[..., None, None],
        )
    rule = "slot" if update == "slot" else "delta"
    read_map = sparse_delta_map(*tokens, num_slots=table.shape[-2], update=rule, threshold=threshold)
    before = read_map.apply_initial(table, tokens.read_index).to(table.dtype).to(table.device)
    if update == "add":  # a dense memory: every token writes and reads the slots in their order
        delta = tokens.beta.unsqueeze(-1) * tokens.value
        dense = tokens.read_weight, tokens.write_weight, tokens.value, tokens.beta, tokens.log_decay
        readings, _ = state_space(*dense, initial_state=table)
    else:
        readings, delta, _ = sparse_delta_writes(*tokens, initial_state=table, update=rule, backend=backend)
    decay = tokens.log_decay if tokens.log_decay.dim() == 3 else tokens.log_decay.mean(-1)
    gates = {"input": tokens.beta, "forget": decay.exp()}
    return Reads(read_map, delta, before, readings, tokens, table, update, gates)


def _attention_reads(
    layer: GatedAttention, x: Tensor, state: LayerState | None, attention_mask: Tensor | None, threshold: float
) -> Reads:
    assert state is None or isinstance(state, KeyValueState)
    streams = streams_of(x, attention_mask, None)
    time = x.shape[1]
    position = streams.places(time, x.device).expand(len(x), time)
    past_key, past_value, past_position = _past(layer, x, state)
    if state is not None:
        position = position + state.length.unsqueeze(-1)
    query, key, value = layer._project(streams.align(x), position)
    key, value = torch.cat((past_key, key), dim=1), torch.cat((past_value, value), dim=1)
    places = torch.cat((past_position, position), dim=1)
    repeats = layer.num_heads // layer.num_kv_heads
    key, value = (part.repeat_interleave(repeats, dim=2) for part in (key, value))
    distance = position.unsqueeze(-1) - places.unsqueeze(1)
    visible = (distance >= 0) & (places >= 0).unsqueeze(1)
    if isinstance(layer, SlidingWindowAttention):
        visible &= distance < layer.window
    scores = torch.einsum("bthd,bshd->bhts", query.float(), key.float()) / layer.head_dim**0.5
    weight = scores.masked_fill(~visible.unsqueeze(1), float("-inf")).softmax(-1).nan_to_num(0.0)
    if (valid := streams.valid(time)) is not None:
        weight = weight * valid[:, None, :, None]
    past = past_key.shape[1]
    value = value.to(weight.dtype)
    before = torch.einsum("bhts,bshd->bthd", weight[..., :past], value[:, :past])
    readings = before + torch.einsum("bhts,bshd->bthd", weight[..., past:], value[:, past:])
    past_weight, weight, delta = weight[..., :past], weight[..., past:], value[:, past:]
    if streams.order is not None:  # back from left-aligned rows
        row = streams.order[:, None, :, None].expand_as(weight)
        weight = torch.zeros_like(weight).scatter(2, row, weight)
        weight = torch.zeros_like(weight).scatter(3, row.transpose(2, 3), weight)
        past_row = streams.order[:, None, :, None].expand_as(past_weight)
        past_weight = torch.zeros_like(past_weight).scatter(2, past_row, past_weight)
        before, readings, delta = (
            streams.restore(part.flatten(-2)).view_as(part) for part in (before, readings, delta)
        )
    no_slots = torch.zeros(len(x), time, layer.num_heads, 0, dtype=torch.float64)
    read_map = sparse_map(weight.double().cpu(), no_slots, threshold)
    return Reads(read_map, delta, before, readings, past_weight=past_weight, past_position=past_position)


def _past(layer: GatedAttention, x: Tensor, state: KeyValueState | None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [B,P,G,D] that came with the state, and their positions [B,P], negative where there is none."""
    if state is None:
        shape = (len(x), 0, layer.num_kv_heads, layer.head_dim)
        return x.new_zeros(shape), x.new_zeros(shape), torch.zeros(len(x), 0, dtype=torch.int64, device=x.device)
    place = torch.arange(state.key.shape[2], device=x.device)
    if isinstance(layer, FullAttention):
        key, value = state.key.transpose(1, 2), state.value.transpose(1, 2)
        position = place.expand(len(x), -1)
        position = torch.where(position < state.length.unsqueeze(-1), position, -1)
    else:
        key, value = unroll(state.key, state.length), unroll(state.value, state.length)
        position = state.length.unsqueeze(-1) - len(place) + place
    return key.to(x.dtype), value.to(x.dtype), position
