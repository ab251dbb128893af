"""The caches of sessions: memories with their rows in pools, and layers that are forked instead of copied.

A session of an `sdm.SDMForCausalLM` has an `SDMCache`; one of a grafted model has the cache of its base, which holds
the states of the memories too. Both are lists of layers, and that is what sessions work with.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from sdm.layers.interface import SequenceLayer
from sdm.layers.row_pool import dense, forked, pooled, start_pooled
from sdm.models.cache import LayerCache, SDMCache, can_step
from sdm.models.configuration import SDMConfig
from sdm.models.fingerprint import base_model, mixers_of
from sdm.models.grafted_mixer import GraftLayerCache
from sdm.models.grafted_model import GraftedModel

if TYPE_CHECKING:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

_Layer = TypeVar("_Layer", bound="CacheLayerMixin | LinearAttentionCacheLayerMixin")


def is_servable(model: object) -> bool:
    """Return whether sessions know the model: an `sdm.SDMForCausalLM` or a grafted model."""
    own = isinstance(getattr(base_model(model), "config", None), SDMConfig) and hasattr(model, "lm_head")
    return own or isinstance(model, GraftedModel)


def empty_cache(model: PreTrainedModel) -> Cache:
    """Return a cache without tokens of the kind that the model takes."""
    if isinstance(model, GraftedModel):
        return model.new_cache()
    return SDMCache(base_model(model).config)


def memory_layers(model: PreTrainedModel, cache: Cache) -> list[tuple[LayerCache, SequenceLayer]]:
    """Return the layers of a cache that hold states of this library, each with the layer whose state it is."""
    if not isinstance(model, GraftedModel):
        return list(zip(cache.layers, mixers_of(model), strict=True))  # type: ignore[arg-type]
    memories = model.memories()
    return [(layer, memories[layer.block]) for layer in cache.layers if isinstance(layer, GraftLayerCache)]


def pool_tables(model: PreTrainedModel, cache: Cache) -> None:
    """Put the tables of sparse memories into the pools that all streams of the model share."""
    for layer, mixer in memory_layers(model, cache):
        layer.replay_with(mixer)
        tables = mixer.sparse_tables() if hasattr(mixer, "sparse_tables") and can_step(mixer) else {}
        for memory in tables.values():
            state = layer.state
            layer.state = start_pooled(mixer.start_state(0), memory) if state is None else pooled(state, memory)


def dense_cache(model: PreTrainedModel, cache: Cache) -> Cache:
    """Return a copy of a cache that holds whole tables and records nothing."""
    whole = copy.copy(cache)
    whole.layers = [fork_layer(layer) for layer in cache.layers]
    if isinstance(whole, SDMCache):
        whole.use_journal(None)
    for layer, mixer in memory_layers(model, whole):
        layer.state = mixer.start_state(1) if layer.state is None else dense(layer.state)
    return whole


def fork_layer(layer: _Layer) -> _Layer:
    """Return a layer of a cache that goes its own way from here and shares what it can."""
    if isinstance(layer, LayerCache):
        fork = copy.copy(layer)
        fork.state = None if layer.state is None else forked(layer.state.trimmed())
        return fork
    if isinstance(layer, DynamicLayer):  # keys and values are replaced by longer ones, and do not change
        return copy.copy(layer)
    return copy.deepcopy(layer)


def layer_nbytes(layer: CacheLayerMixin) -> int:
    """Return the bytes of a layer of a cache, without rows of tables that it shares."""
    if isinstance(layer, LayerCache):
        return layer.nbytes
    parts = [part.values() if isinstance(part, dict) else (part,) for part in vars(layer).values()]
    return sum(x.nbytes for part in parts for x in part if isinstance(x, Tensor))
