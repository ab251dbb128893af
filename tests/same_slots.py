"""Two runs that address the same slots of their memories.

A selection jumps: where two scores are nearly equal, another rounding of them takes another slot, and what is read from
there on has nothing to do with precision. Compared on the same slots, the rest of a computation is continuous.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from torch import Tensor

from sdm.ops import product_key_topk


def on_the_same_slots(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """What both return; the second selects, call by call, the slots that the first has selected."""
    selected: list[Tensor] = []

    def record(scores: Tensor, k: int, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
        values, index = product_key_topk(scores, k, backend=backend)
        selected.append(index)
        return values, index

    def repeat(scores: Tensor, k: int, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
        index = selected.pop(0)
        assert index.shape == (*scores.shape[:-1], k)
        upper, lower = scores.chunk(2, dim=-1)
        return upper.gather(-1, index // upper.shape[-1]) + lower.gather(-1, index % upper.shape[-1]), index

    results = []
    for run, select in ((first, record), (second, repeat)):
        with ExitStack() as stack:
            for module in ("sparse_delta_memory", "product_key_memory"):
                stack.enter_context(mock.patch(f"sdm.layers.{module}.product_key_topk", select))
            results.append(run())
    assert not selected
    return results[0], results[1]
