"""Full attention limited to a window: a grafted model decodes at constant cost, its memory holds what is further back.

Shapes: B batch, T time, K keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sdm.layers.sliding_window_attention import banded_attention
from sdm.models.grafted_mixer import block_input

BANDED = "sdm_banded"
_implementation = attrgetter("config._attn_implementation")
_P = ParamSpec("_P")


class WindowedAttention(nn.Module):
    """Shows an attention module the last `window` tokens, the current one included, and the first `sinks` of a stream.

    It takes the place of the attention module in its block and narrows the mask that the block gives. In a cache it
    keeps the keys and values that a later token can still see, and no others.

    Args:
        mixer: the attention module.
        window: tokens that a token sees.
        sinks: tokens at the start of a stream that every token sees too.
        block: the index of the block.
        num_blocks: blocks of the model.
    """

    def __init__(self, mixer: nn.Module, window: int, sinks: int, block: int, num_blocks: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.window, self.sinks, self.block, self.num_blocks = window, sinks, block, num_blocks
        mixer.sdm_window = None if sinks else window  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("mixer"), name)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Call the attention module with the narrowed mask."""
        x, cache = block_input(args, kwargs)
        T, past, kept = x.shape[1], 0, 0
        if cache is not None:
            layer = self.cache_layer(cache)
            past, kept = layer.length, layer.kept
        mask = kwargs.get("attention_mask")
        assert mask is None or isinstance(mask, Tensor)
        banded = mask is None and past == 0 and not self.sinks and _implementation(self.mixer) == BANDED
        if past + T > self.window + self.sinks and not banded:
            kwargs["attention_mask"] = self._narrowed(mask, x, past, kept)
        return self.mixer(*args, **kwargs)

    def cache_layer(self, cache: object) -> WindowLayer:
        """Return the layer of a cache for this block, which takes the place of an empty one."""
        if not isinstance(cache, DynamicCache) or cache.offloading:
            raise TypeError(f"attention_window takes transformers' DynamicCache, got {type(cache).__name__}")
        if cache.layer_class_to_replicate is not None:
            cache.layers.extend(
                cache.layer_class_to_replicate() for _ in range(max(0, self.num_blocks - len(cache.layers)))
            )
        layer = cache.layers[self.block]
        if not isinstance(layer, WindowLayer):
            if isinstance(layer, CacheLayerMixin) and layer.get_seq_length() > 0:
                raise ValueError("past_key_values was filled without attention_window; start with a new cache")
            layer = WindowLayer(self.window, self.sinks)
            cache.layers[self.block] = layer
        return layer

    def _narrowed(self, mask: Tensor | None, x: Tensor, past: int, kept: int) -> Tensor | None:
        """Which of the keys at hand each token sees, [B,1,T,K] or broadcast."""
        T = x.shape[1]
        token = torch.arange(past, past + T, device=x.device)
        # The keys at hand: the sinks, the last ones of the window, and those of the tokens themselves.
        first = min(self.sinks, kept)
        old = torch.cat((torch.arange(first), torch.arange(past - (kept - first), past))).to(x.device)
        key = torch.cat((old, token))
        distance = token[:, None] - key
        seen = (distance >= 0) & ((distance < self.window) | (key < self.sinks))
        if mask is None:
            return None if T == 1 and bool(seen.all()) else seen[None, None]
        given = mask[..., key] if mask.shape[-1] == past + T else mask
        if given.dtype == torch.bool:
            return given & seen
        return given.masked_fill(~seen, torch.finfo(given.dtype).min)


class WindowLayer(DynamicLayer):
    """The keys and values of the first tokens of a stream and of the last ones."""

    def __init__(self, window: int, sinks: int) -> None:
        super().__init__()
        self.window, self.sinks, self.length = window, sinks, 0
        self.record_past = False

    def activate_past_recording(self) -> None:
        """Keep what leaves the window until the next `crop`, so that tokens can be taken back."""
        self.record_past = True

    @property
    def kept(self) -> int:
        """Tokens whose keys are kept."""
        return self.keys.shape[-2] if self.is_initialized and self.keys is not None and self.keys.numel() else 0

    def trimmed(self, x: Tensor) -> Tensor:
        """Return the keys or values that the next token sees."""
        last = self.window - 1
        if x.shape[-2] <= self.sinks + last:
            return x
        return torch.cat((x[..., : self.sinks, :], x[..., x.shape[-2] - last :, :]), dim=-2)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values at hand, and keep those that later tokens see."""
        keys, values = super().update(key_states, value_states)
        self.length += key_states.shape[-2]
        if not self.record_past:
            self.keys, self.values = self.trimmed(keys), self.trimmed(values)
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over all tokens, which `WindowedAttention` narrows."""
        return self.length + query_length, 0

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens.

        Raises:
            RuntimeError: keys that would be visible again have left the window.
        """
        tokens = abs(tokens_to_remove)
        if self.kept - tokens < min(self.sinks + self.window - 1, self.length - tokens):
            raise RuntimeError(
                "attention_window drops old keys: tokens cannot be taken back behind a full window, unless "
                "cache.activate_past_recording() was called before them"
            )
        super().crop(-tokens)
        self.length -= tokens
        if self.is_initialized and self.keys is not None and self.values is not None:
            self.keys, self.values = self.trimmed(self.keys), self.trimmed(self.values)


def window_reason(model: PreTrainedModel, index: int, mixer: nn.Module | None) -> str | None:
    """Say why the attention of a block cannot be limited to a window, or None if it can."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if mixer is None or "attention_mask" not in inspect.signature(mixer.forward).parameters:
        return f"block {index} has no attention"
    if kinds is not None and kinds[index] != "full_attention":
        return f"block {index} is {kinds[index]}"
    if kinds is None and (getattr(config, "sliding_window", None) or not hasattr(mixer, "is_causal")):
        return f"block {index} is not full attention"
    if config._attn_implementation not in ("sdpa", "eager", BANDED):
        return f'attn_implementation="{config._attn_implementation}" takes no window here; use "sdpa" or "eager"'
    return None


def banded_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Sliding-window attention in blocks for rows without padding; everything else as "sdpa".

    `model.set_attn_implementation(BANDED)` selects it. Long rows then take time in proportion to their length, not to
    its square.
    """
    window = getattr(module, "sdm_window", None) or sliding_window
    T = query.shape[2]
    if attention_mask is not None or dropout or not window or window >= T or key.shape[2] != T:
        given = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    groups = query.shape[1] // key.shape[1]
    query, key, value = (x.transpose(1, 2) for x in (query, repeat_kv(key, groups), repeat_kv(value, groups)))
    if scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    key, value = (nn.functional.pad(x, (0, 0, 0, 0, window, 0)) for x in (key, value))
    visible = (torch.arange(T, device=query.device) + 1).clamp(max=window).expand(len(query), T)
    return banded_attention(query, key, value, visible, max(window, 32)), None


def _only_where_needed(make_mask: Callable[_P, Tensor | None]) -> Callable[_P, Tensor | None]:
    """Make no mask for rows without padding that no cached tokens precede."""

    def banded_mask(*args: _P.args, **kwargs: _P.kwargs) -> Tensor | None:
        plain = kwargs.get("attention_mask") is None and kwargs.get("allow_is_causal_skip", True)
        same = not args and kwargs["q_length"] == kwargs["kv_length"] and not kwargs.get("q_offset", 0)
        return None if plain and same else make_mask(*args, **kwargs)

    return banded_mask


AttentionInterface.register(BANDED, banded_forward)
AttentionMaskInterface.register(BANDED, _only_where_needed(sdpa_mask))
