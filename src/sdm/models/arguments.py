"""The arguments of a forward pass in the forms in which transformers and the libraries around it pass them.

Shapes: B batch, T time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import TransformersKwargs

from sdm.errors import nearest
from sdm.models.cache import SDMCache

# What transformers, its generation, its collators and TRL hand to any model. Names of packed documents that other
# kernels need are among them; `cu_seq_lens_q` are our `cu_seqlens`.
_COMMON = {
    *TransformersKwargs.__annotations__,
    "cache_position",
    "num_logits_to_keep",
    "return_dict",
    "token_type_ids",
    "tokenizer",
}


def check_extras(forward: Callable[..., object], extras: Mapping[str, object]) -> None:
    """Raise a TypeError for an unknown argument that looks like a misspelt one; other unknown arguments are ignored."""
    for name in extras.keys() - _COMMON:
        arguments = [argument for argument in inspect.signature(forward).parameters if argument != "extras"]
        close = nearest(name, arguments, 1, cutoff=0.8)
        if close:
            raise TypeError(f"{forward.__qualname__} has no argument {name!r}; did you mean {close[0]!r}?")


def current_mask(attention_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The columns of the mask that belong to x [B,T,...]; None if every token counts."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != x.shape[0] or attention_mask.shape[1] < x.shape[1]:
        raise ValueError(
            f"attention_mask must be [B,T] = {list(x.shape[:2])}, or longer behind a cache, "
            f"got shape {list(attention_mask.shape)}"
        )
    mask = attention_mask[:, attention_mask.shape[1] - x.shape[1] :] != 0
    if not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask


def document_offsets(
    cu_seqlens: Tensor | None,
    extras: Mapping[str, Any],
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    cache: SDMCache | None,
) -> Tensor | None:
    """Offsets of packed documents: as they are given, or of a row whose positions start anew."""
    if cu_seqlens is None:
        cu_seqlens = extras.get("cu_seq_lens_q")
    if cu_seqlens is not None:
        return cu_seqlens
    if position_ids is None or cache is not None:
        return None
    if position_ids.dim() != 2:
        raise ValueError(f"position_ids must be [B,T], got shape {list(position_ids.shape)}")
    restarts = position_ids[:, 1:] == 0
    if torch.compiler.is_compiling():
        # How many documents there are is not known to the compiler.
        if attention_mask is None:
            torch._assert_async(~restarts.any(), "position_ids start anew within a row; compiled, pass cu_seqlens")
        return None
    if not bool(restarts.any()) or (attention_mask is not None and not bool((attention_mask != 0).all())):
        return None
    if len(position_ids) > 1:
        raise ValueError(
            "position_ids start anew within a row, which means packed documents; pack them into one row (B = 1)"
        )
    starts = restarts[0].nonzero().squeeze(1) + 1
    return F.pad(F.pad(starts, (1, 0)), (0, 1), value=position_ids.shape[1])


def select_positions(x: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The tokens of x [B,T,...] whose logits are wanted: the last so many, those at these places, or with 0 all."""
    if isinstance(logits_to_keep, Tensor):
        return x[:, logits_to_keep]
    return x[:, -logits_to_keep:] if logits_to_keep else x
