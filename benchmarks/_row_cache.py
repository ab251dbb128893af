"""What leaves the cache of a GPU, modelled: rows in the order in which the sparse delta rule touches them, and a cache
that drops the row that was not touched for the longest time.

A model, not a count. It takes all programs to be at the same token, indices to be drawn evenly, and rows to be dropped
whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import torch

Access = tuple[int, bool]  # which row, and whether it is changed


def moved(tokens: Iterable[list[Access]], room: int, skip: int) -> float:
    """Rows per token that come from memory or go back to it, after the first `skip` tokens, with room for so many."""
    changed: OrderedDict[int, bool] = OrderedDict()
    count, seen = 0, 0
    for accesses in tokens:
        seen += 1
        for row, changes in accesses:
            before = changed.pop(row, None)
            changed[row] = changes or bool(before)
            missed = before is None
            dropped = len(changed) > room and changed.popitem(last=False)[1]
            count += (missed + dropped) * (seen > skip)
    return count / (seen - skip)


def drawn(time: int, slots: int, accesses: int) -> Iterator[tuple[list[int], list[int]]]:
    """Slots that each token writes and reads."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(time):
        write, read = (torch.randperm(slots, generator=generator)[:accesses].tolist() for _ in range(2))
        yield write, read


def forward(time: int, slots: int, accesses: int) -> Iterator[list[Access]]:
    for write, read in drawn(time, slots, accesses):
        yield [(row, False) for row in read] + [(row, True) for row in write]


def replay(time: int, slots: int, accesses: int) -> Iterator[list[Access]]:
    """Backward's first half: the writes again."""
    for write, _ in drawn(time, slots, accesses):
        yield [(row, True) for row in write]


def walk_back(time: int, slots: int, accesses: int) -> Iterator[list[Access]]:
    """Backward's second half: memory and its gradient, rows of which follow those of the memory."""
    for write, read in drawn(time, slots, accesses):
        memory = [(row, True) for row in write] + [(row, False) for row in read]
        yield memory + [(slots + row, True) for row in (*write, *read)]
