"""The cache that `generate()` and manual decoding use: one layer state per block, and the number of tokens seen.

The layers know what they keep (attention its keys and values, sliding windows only the last ones, recurrent layers one
state of fixed size), so the cache only stores, reorders and counts.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from sdm.layers.state import LayerState
from sdm.models.configuration import SDMConfig
from sdm.models.layer_types import LAYER_TYPES


class LayerCache(CacheLayerMixin):
    """The state of one layer for every row of a batch. The tensors belong to the cache and change in place."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, layer_type: str) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.is_sliding = layer_type == "sliding_attention"
        self.state: LayerState | None = None
        self.begins: Tensor | None = None  # [B], rows whose streams begin anew at the next tokens
        self.length = 0
        self._steps: bool | None = None

    def mix(self, layer: Any, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Run `layer` on x [B,T,hidden_size] behind the tokens seen so far, and remember where it got to."""
        if self.state is not None and x.shape[0] != self.batch_size:
            raise ValueError(f"past_key_values holds {self.batch_size} rows, but the input has {x.shape[0]}")
        if self.state is not None and self.begins is not None:
            # Here, where the layer runs: wrapped layers (FSDP) have their weights inside of the forward pass only.
            self.state = self.state.restarted(self.begins, layer.start_state(len(x), learn=True))
            self.begins = None
        one_token = x.shape[1] == 1 and attention_mask is None
        if self._steps is None:
            self._steps = _can_step(layer)
        if self.state is not None and one_token and self._steps and not torch.is_grad_enabled():
            self.state = self.state.map(_changeable)
            y = layer.step_(x[:, 0], self.state).unsqueeze(1)
        else:
            y, self.state = layer(x, state=self.state, return_state=True, attention_mask=attention_mask)
        self.length += x.shape[1]
        return y

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """transformers sets it at construction; the state itself is what tells."""

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else self.state.streams

    @property
    def nbytes(self) -> int:
        return 0 if self.state is None else self.state.nbytes

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reset(self) -> None:
        self.state, self.length = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues row beam_idx[i]. Only the rows that change hands are copied."""
        if self.state is not None:
            self.state = self.state.map(lambda x: _reorder(x, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError(
                "a recurrent state cannot forget its last tokens; fork it before them with sdm.MemoryState (assisted "
                "and contrastive decoding are not available)"
            )

    def offload(self) -> None:
        raise NotImplementedError('cache_implementation="offloaded" is not available for this model')

    def prefetch(self) -> None:
        """Nothing is ever offloaded."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """A state begins with the first tokens that `mix` sees."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("this cache is not a store of keys and values; a block calls `mix`")


class SDMCache(Cache):
    """The states of all layers of a model. `SDMCache(config)` is empty; a model fills it as `past_key_values`."""

    layers: list[LayerCache]  # type: ignore[assignment]

    def __init__(self, config: SDMConfig) -> None:
        super().__init__(layers=[LayerCache(kind) for kind in config.layer_types or ()])
        self._sizes = _state_sizes(config)
        # The MemoryState that all rows started from, if there was one: a state taken later shares with it.
        self.origin: Any = None

    def check(self, config: SDMConfig) -> None:
        """Raise unless the states fit a model of this configuration."""
        for name, size in _state_sizes(config).items():
            if self._sizes[name] != size:
                raise ValueError(
                    f"past_key_values is of another model: its {name} is {self._sizes[name]!r}, expected {size!r}"
                )

    def reset(self) -> None:
        super().reset()
        self.origin = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.layers[layer_idx].length

    @property
    def is_initialized(self) -> bool:
        """Whether it has seen tokens."""
        return all(layer.is_initialized for layer in self.layers)

    @property
    def batch_size(self) -> int:
        return self.layers[0].batch_size

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(layer.nbytes for layer in self.layers)


def _state_sizes(config: SDMConfig) -> dict[str, Any]:
    """The fields that decide about the shapes and the meaning of the states."""
    kinds = [LAYER_TYPES[kind] for kind in dict.fromkeys(config.layer_types or ())]
    names = dict.fromkeys(name for kind in kinds for name in kind.state_fields)
    return {
        name: copy.deepcopy(getattr(config, name)) for name in ("layer_types", "hidden_size", "rope_parameters", *names)
    }


def _can_step(layer: Any) -> bool:
    """Whether `step_` may be called past the layer's forward pass. Wrapped layers (peft) have none, and offloaded ones
    (accelerate) have their weights inside of it only."""
    return hasattr(layer, "step_") and not any(hasattr(module, "_hf_hook") for module in layer.modules())


def _changeable(x: Tensor) -> Tensor:
    """Tensors made under `torch.inference_mode` refuse to change outside of it."""
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


def _reorder(x: Tensor, source: Tensor) -> Tensor:
    if len(source) != len(x):
        return x.index_select(0, source)
    moved = (source != torch.arange(len(x), device=x.device)).nonzero().squeeze(1)
    if len(moved):
        x = _changeable(x)
        x[moved] = x.index_select(0, source[moved])
    return x
