"""What a grafted model remembers of one stream: its memories, and the keys and values that attention keeps.

`sdm.MemoryState` takes it from transformers' cache and makes such a cache again. `GraftMark` is a point of a stream
that `model.rewind` goes back to.

Shapes: S streams, H heads of keys, K kept tokens, D channels.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sdm.layers.state import LayerState
from sdm.models.attention_window import WindowedAttention, WindowLayer
from sdm.models.graft import blocks
from sdm.models.grafted_mixer import GraftedMemory, GraftLayerCache

if TYPE_CHECKING:
    from sdm.models.grafted_model import GraftedModel


@dataclasses.dataclass
class AttentionState(LayerState):
    """Keys and values that attention keeps of a stream."""

    key: Tensor  # [S,H,K,D]
    value: Tensor  # [S,H,K,D]
    length: Tensor  # [S] kept tokens


@dataclasses.dataclass(frozen=True)
class AttentionPlace:
    """The attention of a block, as `MemoryState` asks layers for the shapes of their states."""

    example: AttentionState

    def start_state(self, streams: int) -> AttentionState:
        """Return the state of streams without tokens."""
        return self.example.map(lambda x: x[:0].new_zeros(streams, *x.shape[1:]))


@dataclasses.dataclass(frozen=True)
class GraftMark:
    """A point of the stream of a cache."""

    cache: int
    """Identity of the cache."""
    length: int
    """Tokens seen at that point."""


def places(model: GraftedModel) -> list[AttentionPlace | GraftedMemory]:
    """Return one entry per block for its attention, then the memories: the order of a state's contents."""
    cache = new_cache(model)
    device = next(model.parameters()).device
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64, device=device), past_key_values=cache, use_cache=True)
    attention = [AttentionPlace(state.map(lambda x: x[:, :, :0] if x.dim() == 4 else x)) for state in _attention(cache)]
    return [*attention, *model.memories().values()]


def new_cache(model: GraftedModel) -> DynamicCache:
    """Return an empty cache with the layers that a grafted model uses."""
    cache = DynamicCache(config=model.config)
    model.prepare_cache(cache)
    for module in model.modules():
        if isinstance(module, WindowedAttention):
            module.cache_layer(cache)
    return cache


def read_cache(model: GraftedModel, cache: object) -> tuple[list[LayerState], int, int]:
    """Return the states of all blocks' attention and of the memories, the number of rows, and the tokens seen."""
    if not isinstance(cache, DynamicCache):
        raise TypeError(f"cache must be the DynamicCache of a grafted model, got {type(cache).__name__}")
    memories = {layer.block: layer for layer in cache.layers if isinstance(layer, GraftLayerCache)}
    missing = [block for block in model.memories() if block not in memories or memories[block].state is None]
    if missing:
        raise ValueError("the cache is empty, or of another model: run the grafted model on some tokens first")
    if any(layer.failed for layer in memories.values()):
        raise RuntimeError("this cache is unusable: taking back tokens has failed; start with a new one")
    states: list[LayerState] = [*_attention(cache), *(memories[block].state for block in model.memories())]  # type: ignore[list-item]
    if len(states) != len(blocks(model)) + len(model.memories()):
        raise ValueError("the cache is of another model: it has other blocks")
    return states, states[-1].streams, memories[next(iter(memories))].length


def make_cache(model: GraftedModel, states: list[LayerState], length: int) -> DynamicCache:
    """Return a cache that continues these states, which become its own."""
    cache = new_cache(model)
    count = len(blocks(model))
    for layer, state in zip(cache.layers, states[:count], strict=False):
        assert isinstance(layer, DynamicLayer)
        assert isinstance(state, AttentionState)
        layer.lazy_initialization(state.key, state.value)
        layer.keys, layer.values = state.key, state.value
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length
        if isinstance(layer, WindowLayer):
            layer.length = length
    memories = {layer.block: layer for layer in cache.layers if isinstance(layer, GraftLayerCache)}
    for (block, memory), state in zip(model.memories().items(), states[count:], strict=True):
        memories[block].state, memories[block].length = state, length
        memories[block].replay_with(memory)
    return cache


def _attention(cache: DynamicCache) -> list[AttentionState]:
    """The states of the layers of a cache that are the base's own."""
    states = []
    for place, layer in enumerate(cache.layers):
        if isinstance(layer, GraftLayerCache):
            continue
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise TypeError(
                f"block {place} keeps {type(layer).__name__}: a MemoryState takes grafted models whose blocks all have "
                "attention with keys and values"
            )
        keys, values = layer.keys, layer.values
        if isinstance(layer, DynamicSlidingWindowLayer):  # one that records keeps more than the next token sees
            keys, values = (x[:, :, -layer.sliding_window + 1 :] for x in (keys, values))
        elif isinstance(layer, WindowLayer):
            keys, values = (layer.trimmed(x) for x in (keys, values))
        kept = torch.full((len(keys),), keys.shape[2], dtype=torch.int64, device=keys.device)
        states.append(AttentionState(keys, values, kept))
    return states


def rewindable(cache: DynamicCache, tokens: int) -> str | None:
    """Say why a cache cannot take back so many tokens; None if it can."""
    for place, layer in enumerate(cache.layers):
        if isinstance(layer, GraftLayerCache):
            if layer.journal is None:
                return "nothing was recorded"
            try:
                layer.journal.check(tokens, layer.length)
            except ValueError as error:
                return str(error)
        elif isinstance(layer, (DynamicSlidingWindowLayer, WindowLayer)):
            kept = 0 if layer.keys is None else layer.keys.shape[-2]
            sinks, window = (layer.sinks, layer.window) if isinstance(layer, WindowLayer) else (0, layer.sliding_window)
            if kept - tokens < min(sinks + window - 1, layer.get_seq_length() - tokens):
                return f"the window of block {place} has dropped keys that would be visible again"
    return None
