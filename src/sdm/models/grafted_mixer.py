"""A memory in parallel to the mixer of a transformers block, and its state within the cache of that model.

Shapes: B batch, T time, K keys that a mask covers, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from sdm.layers import GatedDeltaNet, ShiftedKeys, SparseDeltaMemory
from sdm.models.cache import LayerCache
from sdm.models.journal import Journal, JournalMixin

CACHE_NAMES = ("past_key_values", "cache_params", "past_key_value", "layer_past")
GraftedMemory: TypeAlias = SparseDeltaMemory | GatedDeltaNet | ShiftedKeys
"""The layers that are grafted."""


class GraftedMixer(nn.Module):
    """Adds what a memory reads to the output of a block's mixer. It takes the mixer's place in the block.

    The mixer is called with exactly the arguments that the block gives. Attributes that the block or the model read
    from the mixer are found here too.

    Args:
        mixer: the attention, or another causal mixer, of the block.
        memory: a layer of `sdm.layers` with the same width.
        block: the index of the block.
        num_blocks: blocks of the model.
    """

    def __init__(self, mixer: nn.Module, memory: GraftedMemory, block: int, num_blocks: int) -> None:
        super().__init__()
        self.mixer, self.memory = mixer, memory
        self.block, self.num_blocks = block, num_blocks
        self.enabled = True  # off: the block of the base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("mixer"), name)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Call the mixer, and add what the memory reads for the same input."""
        if not self.enabled:
            return self.mixer(*args, **kwargs)
        x, cache = block_input(args, kwargs)
        mask, cu_seqlens = document_layout(x, kwargs, cache)
        # Before the mixer runs, which adds the tokens to the cache.
        state = None if cache is None else memory_cache(cache, self.block, self.num_blocks)
        output = self.mixer(*args, **kwargs)
        mixed = output[0] if isinstance(output, tuple) else output
        mixed = mixed + self._remember(x, state, mask, cu_seqlens).to(mixed.dtype)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    def _remember(
        self, x: Tensor, state: GraftLayerCache | None, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        x = x.to(next(self.memory.parameters()).dtype)
        if state is not None:
            return state.mix(self.memory, x, mask)
        if cu_seqlens is not None:
            return self.memory(x.reshape(1, -1, x.shape[-1]), cu_seqlens=cu_seqlens).view_as(x)
        return self.memory(x, attention_mask=mask)


class GraftLayerCache(JournalMixin, LayerCache):
    """The state of one grafted memory, appended to `layers` of the base's own cache.

    The layers of that cache crop one after the other, so that this one keeps a journal of its own.
    """

    def __init__(self, block: int) -> None:
        super().__init__("sdm")
        self.block = block
        self.failed = False

    def mix(self, mixer: nn.Module, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Run the memory behind the tokens seen so far."""
        if self.failed:
            raise RuntimeError("this cache is unusable: taking back tokens has failed; start with a new one")
        return super().mix(mixer, x, attention_mask)

    def activate_past_recording(self) -> None:
        """Record from now on what it takes to take back tokens; transformers calls this before assisted decoding."""
        if self.journal is None:
            self.journal = Journal(1)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens.

        Raises:
            RuntimeError: they were not recorded. The other layers of the cache may have taken theirs back: from now on
                the cache refuses tokens.
        """
        tokens = abs(tokens_to_remove)
        if not tokens or self.state is None:
            return
        try:
            if self.journal is None:
                raise ValueError("nothing was recorded")
            self.journal.check(tokens, self.length)
        except ValueError as error:
            self.failed = True
            raise RuntimeError(
                f"the grafted memory cannot take back {tokens} tokens: {error}. Call model.prepare_cache(cache) and "
                "cache.activate_past_recording() before the tokens that may be taken back; this cache is unusable now"
            ) from error
        self.journal.take_back(tokens, [self])


def block_input(args: tuple[object, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Cache | None]:
    """Find the hidden states and the cache in what a block hands to its mixer."""
    x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    assert isinstance(x, Tensor)
    return x, next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def memory_cache(cache: Cache, block: int, num_blocks: int) -> GraftLayerCache:
    """Return the layer of a cache that holds the memory of a block, appended if the cache has none yet."""
    for layer in reversed(getattr(cache, "layers", ())):
        if isinstance(layer, GraftLayerCache) and layer.block == block:
            return layer
    if not isinstance(cache, DynamicCache) or cache.offloading:
        kind = "an offloaded cache" if isinstance(cache, DynamicCache) else type(cache).__name__
        raise TypeError(
            f"a grafted model takes transformers' DynamicCache, which its memory's state is added to, got {kind}; "
            "leave cache_implementation at its default"
        )
    if cache.layer_class_to_replicate is not None:  # its layers are made as they are used, and found by position
        cache.layers.extend(cache.layer_class_to_replicate() for _ in range(num_blocks - len(cache.layers)))
    own = cache.layers[block] if block < len(cache.layers) else None
    if isinstance(own, CacheLayerMixin) and own.get_seq_length() > 0:
        raise ValueError(
            "past_key_values holds tokens that the grafted memory has not seen: it was filled by another model, or "
            "before the graft; start with a new cache"
        )
    added = GraftLayerCache(block)
    cache.layers.append(added)
    return added


def document_layout(x: Tensor, kwargs: dict[str, Any], cache: Cache | None) -> tuple[Tensor | None, Tensor | None]:
    """Find padding and packed documents in what a block hands to its mixer.

    Blocks get no mask of the tokens but that of attention, in which a token that is not padding sees itself, and sees
    the token before it unless a document begins.

    Returns:
        The mask [B,T] of tokens that are not padding, or None; and the offsets of packed documents in the rows laid end
        to end, or None.
    """
    B, T = x.shape[:2]
    mask: Tensor | None = kwargs.get("attention_mask")
    begins: Tensor | None = None
    offsets = kwargs.get("cu_seq_lens_q")
    positions = kwargs.get("position_ids")
    if mask is not None:
        mask, begins = _visible(mask, B, T)
        mask = None if bool(mask.all()) else mask
    elif offsets is None and cache is None and T > 1 and isinstance(positions, Tensor) and positions.shape[-1] == T:
        steps = positions.reshape(-1, T).diff(dim=-1) != 1
        begins = nn.functional.pad(steps.expand(B, -1), (1, 0))
    if offsets is None and (begins is None or not bool(begins.any())):
        return mask, None
    if cache is not None or mask is not None:
        other = "a cache" if cache is not None else "padding"
        raise ValueError(f"packed documents cannot be combined with {other} in a grafted model; pass use_cache=False")
    if offsets is None:
        assert begins is not None
        begins[:, 0] = True
        starts = begins.flatten().nonzero().squeeze(1)
        offsets = torch.cat((starts, starts.new_tensor([B * T])))
    return None, offsets.to(torch.int64)


def _visible(mask: Tensor, B: int, T: int) -> tuple[Tensor, Tensor | None]:
    """Which tokens [B,T] are not padding, and which begin a document in the midst of a row."""
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] < T:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"a grafted block needs an attention mask [B,K] or [B,1,T,K] with K >= T = {T}, got {shape}; load the base "
            'with attn_implementation="sdpa", "eager" or "flash_attention_2"'
        )
    if mask.dim() == 2:
        return (mask[:, -T:] != 0).expand(B, T), None
    table, past = mask[:, 0], mask.shape[-1] - T
    own = _shown(table.diagonal(past, -2, -1)).expand(B, T)
    before = _shown(table.diagonal(past - 1, -2, -1))
    if past == 0:
        before = nn.functional.pad(before, (1, 0), value=True)
    # The first token here may follow padding of an earlier piece: only documents within this piece are looked for.
    begins = own & ~before.expand(B, T) & nn.functional.pad(own[:, :-1], (1, 0))
    return own, begins


def _shown(mask: Tensor) -> Tensor:
    """A mask as booleans; one that is added to scores hides by very negative numbers."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
