"""The arguments that callers of transformers models pass beside those that the model has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers.utils import TransformersKwargs

from sdm.errors import nearest

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


def check_extras(forward: Callable[..., Any], extras: Mapping[str, Any]) -> None:
    """Models ignore what they do not know, but not what is likely to be a misspelt argument of theirs."""
    for name in extras.keys() - _COMMON:
        arguments = [argument for argument in inspect.signature(forward).parameters if argument != "extras"]
        close = nearest(name, arguments, 1, cutoff=0.8)
        if close:
            raise TypeError(f"{forward.__qualname__} has no argument {name!r}; did you mean {close[0]!r}?")
