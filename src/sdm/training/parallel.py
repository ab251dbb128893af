"""Where ranks differ: the one file of the trainer that knows how its work is dealt to them.

It answers which rows of a batch this process computes and in which pieces, how values and gradients of all processes
become those of the whole batch, how long the gradient is, and who writes (`ranks.first`). The trainer makes the same
calls whatever the number of processes; with one they cost nothing. What the processes say to each other besides is in
`sdm.ranks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sdm.data.batch import IGNORED, Batch, BatchSource
from sdm.ranks import ALONE, Ranks


class Parallel:
    """The ranks of a run."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks

    def pieces(self, batch_size: int, accumulation: int = 1) -> list[range]:
        """The rows of a batch that this rank computes, in pieces whose gradients are added up.

        Ranks get consecutive rows, the same number but for the last ranks, and all the same number of pieces. A piece
        is never larger than the batch cut into `accumulation`, so that fewer ranks take more pieces and no more
        memory. Where rows run out a piece is empty: see `draw`.
        """
        each = math.ceil(batch_size / self.ranks.size)
        number = math.ceil(each / math.ceil(batch_size / accumulation))
        rows = range(batch_size)[self.ranks.rank * each : (self.ranks.rank + 1) * each]
        size = math.ceil(each / number)
        return [rows[place * size : (place + 1) * size] for place in range(number)]

    def sum(self, *values: float) -> tuple[float, ...]:
        """Each value, added up over the rows of all ranks."""
        return self.ranks.sum(*values)

    def reduce_gradients(self, model: nn.Module, last: bool) -> None:
        """Say before a piece is computed whether it is the last one: only after it the ranks add up what they have."""

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The length of the whole gradient."""
        return torch.nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])

    def clip_(self, parameters: Iterable[nn.Parameter], longest: float, norm: Tensor) -> None:
        """Shorten a gradient of length `norm`."""
        torch.nn.utils.clip_grads_with_norm_(parameters, longest, norm)

    def rows_of_all(self, own: Tensor, batch_size: int) -> Tensor:
        """What this rank has of each of its rows, [rows, ...], as its share of [batch_size, ...]."""
        return own

    def own_rows(self, shared: Tensor) -> Tensor:
        """The inverse of `rows_of_all`."""
        return shared


def draw(source: BatchSource, step: int, rows: range) -> Batch:
    """These rows of a step's batch. A rank that has none takes part with a row of which nothing is to be predicted:
    ranks only get on together."""
    if rows:
        return source.batch(step, rows)
    batch = source.batch(step, range(1))
    return Batch(batch.input_ids, torch.full_like(batch.targets, IGNORED), batch.cu_seqlens, batch.reset)
