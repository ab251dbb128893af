"""How the documents of a store become rows of fixed length, in an order that is a function of the seed.

An epoch is a random order of the documents. It is planned as a whole when it is first asked for: where each document
starts costs one pass over the lengths, and then any row of the epoch is found by bisection.

Shapes: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sdm.data.batch import IGNORED
from sdm.data.randomness import Permutation, generator_of
from sdm.data.shards import TokenStore


class Row(NamedTuple):
    """One row of a batch."""

    input_ids: Tensor  # [T]
    targets: Tensor  # [T]
    lengths: list[int]  # of the pieces of documents in it, padding included
    reset: bool  # whether it starts a document, or cannot continue the one it is in


class Plan(NamedTuple):
    """The documents of an epoch in their order, and the place where each starts."""

    order: Tensor  # [documents]
    starts: Tensor  # [documents + 1], in tokens or in pieces

    @property
    def size(self) -> int:
        """Number of tokens (or pieces of documents) of the epoch."""
        return int(self.starts[-1])

    def find(self, place: int) -> int:
        """Which document, counted in the order of the epoch, covers a place."""
        return int(torch.searchsorted(self.starts, place, right=True)) - 1


class ConcatenatedRows:
    """All documents of an epoch one after the other, cut into rows; the rows come in random order.

    Every token is in exactly one row of an epoch. The last row is padded.
    """

    def __init__(self, store: TokenStore, sequence_length: int, seed: int, shuffle: bool = True) -> None:
        self.store, self.sequence_length, self.seed, self.shuffle = store, sequence_length, seed, shuffle
        self.num_rows = -(-store.num_tokens // sequence_length)
        self._plan = _planner(store.lengths, seed, shuffle)
        self._rows = lru_cache(maxsize=2)(lambda epoch: Permutation(self.num_rows, seed, "rows", epoch))

    def row(self, index: int) -> Row:
        """The row `index` of an endless sequence of epochs."""
        epoch, index = divmod(index, self.num_rows)
        plan = self._plan(epoch)
        start = (self._rows(epoch)[index] if self.shuffle else index) * self.sequence_length
        stop = min(start + self.sequence_length, plan.size)
        place, pieces = plan.find(start), []
        first = start - int(plan.starts[place])
        while start < stop:
            end = min(int(plan.starts[place + 1]), stop)
            pieces.append(_piece(self.store, int(plan.order[place]), first, end - start))
            start, place, first = end, place + 1, 0
        return _row(pieces, self.sequence_length, self.store.eos_id, reset=True)

    def padding(self) -> Row:
        """Return a row of padding, which predicts nothing."""
        return _row([], self.sequence_length, self.store.eos_id, reset=True)


class DocumentStreams:
    """Documents cut into pieces of a row each, consecutive pieces in consecutive steps of the same batch row.

    A model that carries its state from step to step so sees documents longer than a row as a whole. The last piece of
    a document is padded: no row holds two documents. The pieces of an epoch are dealt to the batch rows in equal
    stretches; the few documents on the border of two stretches start anew where the second one begins.
    """

    def __init__(self, store: TokenStore, sequence_length: int, num_rows: int, seed: int, shuffle: bool = True) -> None:
        self.store, self.sequence_length, self.num_rows = store, sequence_length, num_rows
        pieces = (store.lengths + sequence_length - 1) // sequence_length
        self._plan = _planner(pieces, seed, shuffle)
        self.num_pieces = int(pieces.sum())
        self.steps_per_epoch = -(-self.num_pieces // num_rows)

    def row(self, step: int, row: int) -> Row:
        """Return a row of the batch of a step; it continues the same row of the step before unless `reset`."""
        epoch, step = divmod(step, self.steps_per_epoch)
        first, end = (i * self.num_pieces // self.num_rows for i in (row, row + 1))
        if first + step >= end:
            return self.padding()
        plan = self._plan(epoch)
        place = plan.find(first + step)
        number = first + step - int(plan.starts[place])
        piece = _piece(self.store, int(plan.order[place]), number * self.sequence_length, self.sequence_length)
        return _row([piece], self.sequence_length, self.store.eos_id, reset=step == 0 or number == 0)

    def padding(self) -> Row:
        """Return a row of padding, which predicts nothing."""
        return _row([], self.sequence_length, self.store.eos_id, reset=True)


def _piece(store: TokenStore, document: int, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens of a document and their successors; what follows the last one is the end of text."""
    tokens = store.document(document, start, start + length + 1)
    if len(tokens) == length + 1:
        return tokens[:-1], tokens[1:]
    return tokens, torch.cat((tokens[1:], tokens.new_tensor([store.eos_id])))


def _row(pieces: list[tuple[Tensor, Tensor]], sequence_length: int, padding: int, reset: bool) -> Row:
    lengths = [len(inputs) for inputs, _ in pieces]
    missing = sequence_length - sum(lengths)
    if missing:
        pieces = [*pieces, (torch.full((missing,), padding), torch.full((missing,), IGNORED))]
        lengths.append(missing)
    inputs, targets = zip(*pieces, strict=True)
    return Row(torch.cat(inputs), torch.cat(targets), lengths, reset)


def _planner(lengths: Tensor, seed: int, shuffle: bool) -> Callable[[int], Plan]:
    """The plan of an epoch. Two are kept, because a batch may hold the end of one and the start of the next."""

    @lru_cache(maxsize=2)
    def plan(epoch: int) -> Plan:
        if shuffle:
            order = torch.randperm(len(lengths), generator=generator_of(seed, "documents", epoch))
        else:
            order = torch.arange(len(lengths))
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths[order], 0, out=starts[1:])
        return Plan(order, starts)

    return plan
