"""What a model of any library keeps of what it has read: the tensors of its cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

CACHES = ("past_key_values", "cache_params", "state")  # what models call it


def tensors(content: Any) -> Iterator[Tensor]:
    """All that an object refers to, each once."""
    yield from _tensors(content, set())


def _tensors(content: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(content) in seen or isinstance(content, (str, type)):
        return
    seen.add(id(content))
    if isinstance(content, Tensor):
        yield content
        return
    if isinstance(content, dict):
        parts: Any = content.values()
    elif isinstance(content, (list, tuple)):
        parts = content
    else:
        parts = getattr(content, "__dict__", {}).values()
    for part in parts:
        yield from _tensors(part, seen)
