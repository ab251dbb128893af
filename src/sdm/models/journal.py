"""The journal of a cache: what it takes to take tokens back.

A token changes few rows of a sparse memory, one place of a window and a small state elsewhere. Before a call of the
model changes them, every layer makes an undo record (`sdm.layers.state.Undo`); the records of one call are an entry,
and the entries are a stack. Undoing whole entries restores the states bit for bit. To take back a part of an entry, the
entry is undone and the tokens that are kept are put back by the layers' `replay_`, without their projections.

The stack is bounded by a number of tokens and of bytes: the oldest entries go first.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from sdm.layers.state import Undo

if TYPE_CHECKING:
    from sdm.models.cache import LayerCache

TOKENS, BYTES = 64, 1 << 30

_log = logging.getLogger(__name__)
_points = itertools.count()


def next_point() -> int:
    """Return a number for a point of a stream, other than any before."""
    return next(_points)


@dataclass(frozen=True)
class Mark:
    """A point of a stream that `SDMCache.rewind` returns to."""

    point: int
    length: int  # tokens seen there


@dataclass
class Entry:
    """The undo records of one call of the model."""

    before: int  # the point of the stream before the call
    tokens: int
    divisible: bool  # a part of the tokens can be taken back
    undo: list[Undo] = field(default_factory=list)  # of each layer

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(undo.nbytes for undo in self.undo)

    def map(self, function: Callable[[Tensor], Tensor]) -> Entry:
        """Return the entry with `function` applied to each tensor of its records."""
        return Entry(self.before, self.tokens, self.divisible, [undo.map(function) for undo in self.undo])

    def first(self, tokens: int) -> Entry:
        """Return the entry of the first `tokens` tokens of the call."""
        return Entry(self.before, tokens, self.divisible, [undo.first(tokens) for undo in self.undo])


class Journal:
    """A bounded stack of entries, newest last.

    Args:
        layers: layers of the model.
        tokens: how many tokens can be taken back at least, if the bytes allow it. Of a longer piece, the last `tokens`
            are recorded.
        nbytes: limit of the records' size.
    """

    def __init__(self, layers: int, tokens: int = TOKENS, nbytes: int = BYTES) -> None:
        for name, size in (("tokens", tokens), ("nbytes", nbytes)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} of a journal must be a positive integer, got {size!r}")
        self.layers, self.tokens, self.nbytes_limit = layers, tokens, nbytes
        self.entries: list[Entry] = []
        self.point = next_point()

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def reach(self) -> int:
        """How many tokens can be taken back."""
        return sum(entry.tokens for entry in self.entries)

    @property
    def steps(self) -> list[int]:
        """How many tokens can be taken back bit for bit: sums of whole entries, ascending."""
        return list(itertools.accumulate(entry.tokens for entry in reversed(self.entries)))

    def clear(self) -> None:
        """Forget everything: the tokens up to here cannot be taken back."""
        self.entries, self.point = [], next_point()

    def load(self, entries: list[Entry]) -> None:
        """Take over entries that lead up to the point where the stream is now."""
        self.entries = []
        point = next_point()
        for entry in entries:
            self.entries.append(Entry(point, entry.tokens, entry.divisible, entry.undo))
            point = next_point()
        self.point = point

    def begin(self, place: int) -> None:
        """A call reaches the layer at `place`. If the call before failed on its way, nothing can be taken back."""
        if place == 0 and not self.complete:
            self.clear()

    def interrupt(self, place: int) -> None:
        """Tokens are about to pass without a record. Every layer says so; the first one counts."""
        if place == 0:
            self.clear()

    def add(self, place: int, tokens: int, divisible: bool, undo: Undo) -> None:
        """Add the record of the layer at `place`.

        The first layer of a model begins an entry, or several for a call with padding; the others complete them in
        order.
        """
        if place == 0:
            self.entries.append(Entry(self.point, tokens, divisible))
            self.point = next_point()
        entry = next(entry for entry in self.entries if len(entry.undo) == place)
        entry.divisible = entry.divisible and divisible
        entry.undo.append(undo)
        if place == self.layers - 1 and self.complete:
            self._drop_oldest()

    @property
    def complete(self) -> bool:
        """Whether every layer has added its records of the last call."""
        return not self.entries or len(self.entries[-1].undo) == self.layers

    def _drop_oldest(self) -> None:
        sizes = [entry.nbytes for entry in self.entries]
        tokens, nbytes = self.reach, sum(sizes)
        drop = 0
        while drop < len(sizes) and (tokens - self.entries[drop].tokens >= self.tokens or nbytes > self.nbytes_limit):
            tokens, nbytes = tokens - self.entries[drop].tokens, nbytes - sizes[drop]
            drop += 1
        if drop == len(sizes):
            _log.warning(
                "the journal of %d bytes does not hold the last %d tokens, which take %d: they cannot be taken back",
                *(self.nbytes_limit, self.entries[-1].tokens, sizes[-1]),
            )
        self.entries = self.entries[drop:]

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply `function` to each tensor of the records, for instance to reorder streams."""
        self.entries = [entry.map(function) for entry in self.entries]

    def mark(self, length: int) -> Mark:
        """Name the point of the stream where it is now."""
        return Mark(self.point, length)

    def tokens_since(self, mark: Mark) -> int | None:
        """How many tokens were seen since the mark, or None if it is out of reach."""
        if mark.point == self.point:
            return 0
        tokens = 0
        for entry in reversed(self.entries):
            tokens += entry.tokens
            if entry.before == mark.point:
                return tokens
        return None

    def check(self, tokens: int, length: int) -> None:
        """Raise unless the last `tokens` of a stream of `length` tokens can be taken back."""
        reach = self.reach
        if not self.complete:
            raise RuntimeError("the last call of the model failed on its way: its tokens cannot be taken back")
        if tokens > reach:
            raise ValueError(
                f"cannot take back {tokens} tokens: the journal reaches back {reach}, to a length of {length - reach}; "
                "record more with cache.record(tokens=..., nbytes=...) before the tokens are seen"
            )
        whole = 0
        for entry in reversed(self.entries):
            if whole < tokens < whole + entry.tokens and not entry.divisible:
                raise ValueError(
                    f"cannot take back {tokens} tokens: they begin within a call of {entry.tokens} tokens through a "
                    f"layer that cannot replay tokens; take back {whole} or {whole + entry.tokens}"
                )
            whole += entry.tokens

    def pop(self, tokens: int) -> tuple[Entry, Entry | None]:
        """Take the newest entry off the stack, or all but its first tokens if it has more than `tokens`.

        Returns:
            The entry, and the entry of its first tokens that stays on the stack and has to be replayed.
        """
        entry = self.entries.pop()
        if tokens >= entry.tokens:
            self.point = entry.before
            return entry, None
        kept = entry.first(entry.tokens - tokens)
        self.entries.append(kept)
        self.point = next_point()
        return entry, kept

    @torch.no_grad()
    def take_back(self, tokens: int, layers: Sequence[LayerCache]) -> None:
        """Undo the last tokens in all layers, and replay those that are kept of their call."""
        while tokens:
            entry, kept = self.pop(tokens)
            taken = entry.tokens - (0 if kept is None else kept.tokens)
            for place, layer in enumerate(layers):
                layer.take_back(entry.undo[place], taken, None if kept is None else kept.undo[place])
            tokens -= taken


class SplitJournal(Journal):
    """The journal of a batch: every session's own journal gets its row of each record."""

    def __init__(self, layers: int, journals: Sequence[Journal | None]) -> None:
        super().__init__(layers)
        self._journals = list(enumerate(journals))

    def _each(self) -> Iterator[tuple[int, Journal]]:
        return ((row, journal) for row, journal in self._journals if journal is not None)

    def begin(self, place: int) -> None:
        """Tell every session's journal."""
        for _, journal in self._each():
            journal.begin(place)

    def interrupt(self, place: int) -> None:
        """Tell every session's journal."""
        for _, journal in self._each():
            journal.interrupt(place)

    def add(self, place: int, tokens: int, divisible: bool, undo: Undo) -> None:
        """Give every session's journal its row."""
        for row, journal in self._each():
            own = undo.map(lambda x, row=row: x[row : row + 1].clone())  # type: ignore[misc]
            journal.add(place, tokens, divisible, own)


class _Rows(Protocol):
    """A cache, or a layer of one, whose rows can be reordered."""

    def reset(self) -> None: ...
    def reorder_cache(self, beam_idx: Tensor) -> None: ...
    def batch_select_indices(self, indices: Tensor) -> None: ...
    def batch_repeat_interleave(self, repeats: int) -> None: ...


class JournalMixin:
    """Reorders the records of a journal together with the rows of the class that comes behind it."""

    journal: Journal | None

    def reset(self) -> None:
        """Forget all tokens."""
        cast(_Rows, super()).reset()
        if self.journal is not None:
            self.journal.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue row beam_idx[i], with its journal."""
        cast(_Rows, super()).reorder_cache(beam_idx)
        if self.journal is not None:
            self.journal.map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, with their journal."""
        cast(_Rows, super()).batch_select_indices(indices)
        if self.journal is not None:
            self.journal.map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, with its journal."""
        cast(_Rows, super()).batch_repeat_interleave(repeats)
        if self.journal is not None:
            self.journal.map(lambda x: x.repeat_interleave(repeats, dim=0))
