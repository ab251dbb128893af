"""The states of a layer, a row for each sequence, and how many of them a budget holds.

Nothing here needs vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sdm.layers import LayerState, SequenceLayer

NULL_BLOCK = 0
"""The block of vLLM's that stands for no state."""


@dataclasses.dataclass(frozen=True)
class Span:
    """The tokens start:end of a batch, behind which the state of their sequence is in `row`."""

    start: int
    end: int
    row: int
    source: int | None
    """The row of the state before them, `row` itself or another one that stays as it is; None: the initial state."""


def spans_of(start: int, end: int, length: int, table: Sequence[int], block_size: int) -> list[Span]:
    """Return the span of a sequence in a step, cut in two behind the last block whose state is kept.

    Args:
        start: where its tokens begin in the step.
        end: where they end.
        length: tokens of the sequence, those of the step included.
        table: for each block of tokens, which block of vLLM's stands for the state behind it, or `NULL_BLOCK`.
        block_size: tokens of a block.
    """
    before = length - (end - start)
    first, last = max(0, (before - 1) // block_size), (length - 1) // block_size
    source = None if before == 0 else table[first]
    kept = next((place for place in range(last - 1, first - 1, -1) if table[place] != NULL_BLOCK), None)
    if kept is None or before >= (kept + 1) * block_size:
        return [Span(start, end, table[last], source)]
    cut = start + (kept + 1) * block_size - before
    return [Span(start, cut, table[kept], source), Span(cut, end, table[last], table[kept])]


class StatePool:
    """The states of up to `rows` sequences in one layer. A sequence changes its own row in place, and nothing else."""

    def __init__(self, layer: SequenceLayer, rows: int) -> None:
        self.layer = layer
        self.start = layer.start_state(1)
        self.states = self.start.map(lambda x: x.new_empty((rows, *x.shape[1:])))

    @torch.no_grad()
    def mix(self, x: Tensor, spans: Sequence[Span], y: Tensor | None = None) -> Tensor:
        """Mix tokens x [tokens,hidden_size], those of each span behind the state of its sequence, into y or zeros.

        Sequences with one token and neighbouring rows are stepped together; the others one after the other.
        """
        y = torch.zeros_like(x) if y is None else y
        for span in spans:
            if span.source is None:
                self._restart(span.row)
            elif span.source != span.row:
                self._fork(span.source, span.row)
        for run in neighbours(span for span in spans if span.end - span.start == 1):
            places = torch.tensor([span.start for span in run], device=x.device)
            before = self._rows(run[0].row, run[-1].row + 1)
            state = before.map(lambda part: part)
            y[places] = self.layer.step_(x[places], state).to(y.dtype)
            _keep(before, state)
        for span in spans:
            if span.end - span.start > 1:
                before = self._rows(span.row, span.row + 1)
                state = before.map(lambda part: part)
                y[span.start : span.end] = self.layer.extend_(x[None, span.start : span.end], state)[0].to(y.dtype)
                _keep(before, state)
        return y

    def _rows(self, first: int, last: int) -> LayerState:
        return self.states.map(lambda x: x[first:last])

    def _restart(self, row: int) -> None:
        _keep(self._rows(row, row + 1), self.start)

    def _fork(self, source: int, row: int) -> None:
        _keep(self._rows(row, row + 1), self._rows(source, source + 1))


def _keep(before: LayerState, after: LayerState) -> None:
    """Copy the tensors that a layer replaced into the pool; a large table changed in place and is not copied."""
    new = after.tensors()
    for name, x in before.tensors().items():
        if new[name] is not x:
            x.copy_(new[name])


def neighbours(spans: Iterable[Span]) -> list[list[Span]]:
    """Group spans into runs of consecutive rows."""
    runs: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.row):
        if runs and span.row == runs[-1][-1].row + 1:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def rows_within(budget: int, bytes_per_sequence: int, most: int) -> int:
    """Return how many sequences fit into `budget` bytes, beside the initial state, and at most `most`.

    Raises:
        ValueError: not a single sequence fits.
    """
    if not bytes_per_sequence:
        return most
    fit = budget // bytes_per_sequence - 1
    if fit < 1:
        raise ValueError(
            f"sdm_state_gib = {budget / 2**30:g} holds no sequence: a sequence's state takes "
            f"{bytes_per_sequence / 2**30:.3g} GiB and the initial state as much; give at least "
            f"{2 * bytes_per_sequence / 2**30:.3g} in additional_config"
        )
    return min(fit, most)
