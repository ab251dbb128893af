"""The state of a model after one stream of tokens: to keep, fork, compare, rewind, save and resume.

An SDM memory is a huge table of which a stream changes a part. A `MemoryState` keeps the rows that differ from the
learned initial table M0, which belongs to the model. Its tensors never change, so forks share them; only a cache, the
working copy that decoding changes in place, holds whole tables.

Shapes: H heads, N slots, D value channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache

from sdm.layers import LayerState, SparseDeltaMemory
from sdm.layers.state import Snapshot
from sdm.models import state_file
from sdm.models.cache import SDMCache
from sdm.models.fingerprint import Fingerprint, base_model, fingerprint, is_grafted, mixers_of
from sdm.models.journal import TOKENS, Entry, Journal, next_point

if TYPE_CHECKING:
    from sdm.models.grafted_model import GraftedModel

# A fork of a fork of a fork ... is looked up layer by layer; beyond this depth it is stored anew in one piece.
MAX_DEPTH = 8

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class SlotRows:
    """Rows of a table [H * N, D] that differ from what lies below."""

    index: Tensor  # [n] ascending
    rows: Tensor  # [n,D]

    @property
    def nbytes(self) -> int:
        """Bytes of slots and rows."""
        return self.index.nbytes + self.rows.nbytes


@dataclass(frozen=True)
class Memory:
    """An SDM table: M0 below, changed rows above it, the later ones on top."""

    base: Tensor | None  # [H,N,D], the model's own; None for zeros
    base_version: int
    shape: tuple[int, int, int]
    dtype: torch.dtype
    changes: tuple[SlotRows, ...]

    def table(self) -> Tensor:
        """The whole table, [H,N,D], newly made."""
        heads, slots, channels = self.shape
        table = self.start().reshape(heads * slots, channels)
        for change in self.changes:
            table[change.index] = change.rows
        return table.view(self.shape)

    def start(self) -> Tensor:
        """Return a copy of the initial table, [H,N,D]."""
        if self.base is None:
            device = self.changes[0].rows.device if self.changes else None
            return torch.zeros(self.shape, dtype=self.dtype, device=device)
        if self.base._version != self.base_version:
            raise RuntimeError("the model's initial_state has changed since this MemoryState was taken")
        return self.base.to(self.dtype, copy=True)

    def merged(self) -> SlotRows:
        """All changed rows in one piece."""
        if len(self.changes) == 1:
            return self.changes[0]
        index = torch.cat([change.index for change in self.changes]).unique()
        return SlotRows(index, self.rows_at(index))

    def rows_at(self, index: Tensor) -> Tensor:
        """The rows [n,D] of these slots."""
        rows = torch.zeros(len(index), self.shape[-1], dtype=self.dtype, device=index.device)
        if self.base is not None:
            rows = self.base.reshape(-1, self.shape[-1])[index].to(self.dtype)
        for change in self.changes:
            if len(change.index):
                place = torch.searchsorted(change.index, index).clamp(max=len(change.index) - 1)
                here = change.index[place] == index
                rows[here] = change.rows[place[here]]
        return rows


@dataclass(frozen=True)
class SlotChanges:
    """The slots of one layer in which two states differ, and the length of the difference of their rows."""

    head: Tensor  # [n]
    slot: Tensor  # [n]
    change: Tensor  # [n]

    def __len__(self) -> int:
        return len(self.slot)


# Of one layer, by the names of its state's tensors.
Content = dict[str, Tensor | Memory]
_State = TypeVar("_State", bound="MemoryState")


class MemoryState:
    """Everything a model remembers of one stream.

        state = sdm.MemoryState.from_cache(model, cache)     # after any number of tokens
        state.save("conversation.sdm")
        state = sdm.MemoryState.load("conversation.sdm", model)
        a, b = state.fork(), state.fork()                    # cost nothing
        model(tokens, past_key_values=a.cache(model))        # continues exactly where the stream was

    States are immutable. `cache` makes the working copy that a model advances; `from_cache` takes a state from it
    again, which shares with the state that the cache was made from whatever has not changed since.

    A state taken from a cache that records (`SDMCache.record`, `SDMCache.mark`) brings its journal: `rewind` gives the
    state of some tokens ago, `forget` the state without a span of tokens.
    """

    pending: tuple[int, ...]
    """Tokens that the stream goes on with but the model has not seen, such as the last one that it generated."""

    def __init__(
        self,
        model_id: Fingerprint,
        contents: tuple[Content, ...],
        length: int,
        owned: int,
        pending: Sequence[int] = (),
        history: tuple[Entry, ...] = (),
    ) -> None:
        self._model_id, self._contents, self._history = model_id, contents, history
        self._length, self._owned, self.pending = length, owned, tuple(pending)
        vocab_size = model_id.architecture["vocab_size"]
        for token in self.pending:
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(f"pending must be within 0 ... vocab_size - 1 = {vocab_size - 1}, got {token!r}")

    def __deepcopy__(self: _State, memo: dict[int, Any]) -> _State:
        """A state never changes: `copy.deepcopy(cache)`, transformers' way of using a prompt again, shares it."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a MemoryState is not pickled; write it with save() and read it with load()")

    @classmethod
    def from_cache(
        cls: type[_State], model: nn.Module, cache: Cache, row: int | None = None, pending: Sequence[int] = ()
    ) -> _State:
        """The state of one row of a cache, which may be left out if there is one only. Later tokens on the cache do not
        change it. The cache is an `SDMCache`, or of a grafted model transformers' `DynamicCache`; then the row must
        have no padding."""
        mixers, states, batch_size, length = _read(model, cache)
        if row is None:
            if batch_size > 1:
                raise ValueError(f"row must say which of the {batch_size} rows of the cache to take the state of")
            row = 0
        if not -batch_size <= row < batch_size:
            raise IndexError(f"row = {row} is not one of the {batch_size} rows of the cache")
        model_id = fingerprint(model)
        origin = getattr(cache, "origin", None)
        origin = origin if isinstance(origin, MemoryState) and origin._model_id == model_id else None
        contents: list[Content] = []
        owned = 0
        for place, (mixer, state) in enumerate(zip(mixers, states, strict=True)):
            below = {} if origin is None else origin._contents[place]
            contents.append(_take(mixer, state, row, below))
            owned += _bytes(contents[-1], below)
        history = _row_of(getattr(cache, "journal", None), row % batch_size)
        owned += sum(entry.nbytes for entry in history)
        return cls(model_id, tuple(contents), length, owned, pending, history)

    def check_model(self, model: nn.Module) -> None:
        """Raise a ValueError unless this is a state of the model, with these weights."""
        self._model_id.check(fingerprint(model), "this MemoryState")

    def cache(self, model: nn.Module, batch_size: int = 1) -> Any:
        """A cache in which every row continues this state. It holds whole tables and is the caller's to change.

        It is an `SDMCache`, or of a grafted model transformers' `DynamicCache`.
        """
        self.check_model(model)
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        if is_grafted(model):
            return self._grafted_cache(model, batch_size)
        cache = SDMCache(base_model(model).config)
        for layer, mixer, content in zip(cache.layers, mixers_of(model), self._contents, strict=True):
            rows = {name: _repeated(x, batch_size) for name, x in content.items()}
            layer.state = mixer.start_state(0).with_tensors(rows)
            layer.length = self._length
            layer.replay_with(mixer)
        if self._history:
            journal = cache.record(max(TOKENS, sum(entry.tokens for entry in self._history)))
            journal.load([entry.map(lambda x: _repeated(x, batch_size)) for entry in self._history])
        cache.origin = self
        return cache

    def _grafted_cache(self, model: GraftedModel, batch_size: int) -> Cache:
        from sdm.models.grafted_state import AttentionState, make_cache

        memories = list(model.memories().values())
        attention = len(self._contents) - len(memories)
        states: list[LayerState] = []
        for place, content in enumerate(self._contents):
            rows = {name: _repeated(x, batch_size) for name, x in content.items()}
            if place < attention:
                states.append(AttentionState(**rows))
            else:
                states.append(memories[place - attention].start_state(0).with_tensors(rows))
        cache = make_cache(model, states, self._length)
        cache.__dict__["origin"] = self
        return cache

    @property
    def marks(self) -> list[int]:
        """Lengths that `rewind` can go back to bit for bit, the longest first."""
        steps = itertools.accumulate(entry.tokens for entry in reversed(self._history))
        return [self._length - step for step in steps]

    def rewind(self: _State, model: nn.Module, tokens: int) -> _State:
        """Return the state of `tokens` tokens ago: to answer again, or after another last message.

        It is exact, bit for bit, at the lengths of `marks`; in between, the tokens that are kept are replayed. It makes
        a working copy of the tables, like `cache`.

        Raises:
            ValueError: the history does not reach so far; the message says how far.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise ValueError(f"tokens must be a number of tokens to take back, got {tokens!r}")
        if tokens and is_grafted(model):
            raise ValueError(
                "a state of a grafted model has no history: keep a fork of an earlier state, or use model.mark(cache) "
                "and model.rewind(cache, mark)"
            )
        if tokens and not self._history:
            raise ValueError(
                "this MemoryState has no history to go back in: take it from a cache that records (cache.record() or "
                "cache.mark() before the tokens), and save it with history=N"
            )
        cache = self.cache(model)
        cache.crop(-tokens)
        return type(self).from_cache(model, cache)

    @torch.no_grad()
    def forget(self: _State, model: nn.Module, span: tuple[int, int], tail: Sequence[int] = ()) -> _State:
        """Return the state of the stream without the tokens start ... end - 1, as if they had never been there.

        It rewinds to the start of the span and reads the tokens behind it again: its cost is that of reading `tail`.

        Args:
            model: the model of this state.
            span: (start, end), numbers of tokens.
            tail: the tokens of the stream from `end` on; a state does not hold tokens.
        """
        start, end = span
        if not 0 <= start < end <= self._length:
            raise ValueError(f"span must be within the stream of {self._length} tokens, got {start} to {end}")
        if len(tail) != self._length - end:
            raise ValueError(
                f"tail must be the {self._length - end} tokens behind the span, which are read again; got {len(tail)}"
            )
        state = self.rewind(model, self._length - start)
        cache = state.cache(model)
        if len(tail):
            ids = torch.tensor([list(tail)], device=next(model.parameters()).device)
            model(ids, past_key_values=cache, use_cache=True)
        return type(self).from_cache(model, cache, pending=self.pending)

    def fork(self: _State) -> _State:
        """Another state that goes its own way from here. It shares every tensor with this one."""
        return type(self)(self._model_id, self._contents, self._length, 0, self.pending, self._history)

    def __len__(self) -> int:
        """Tokens seen, the padding of the row included."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes that this state holds of its own. What it shares with the state it was forked or continued from is
        counted there; M0 belongs to the model."""
        return self._owned

    def diff(self, other: MemoryState) -> dict[int, SlotChanges]:
        """The slots in which two states of a model differ, by the index of the SDM layer."""
        if not isinstance(other, MemoryState):
            raise TypeError(f"other must be an sdm.MemoryState, got {type(other).__name__}")
        self._model_id.check(other._model_id, "this MemoryState")
        mine, theirs = self._memories(), other._memories()
        return {layer: _difference(mine[layer], theirs[layer]) for layer in mine}

    def save(self, path: str | PathLike[str], history: int = 0) -> None:
        """Write a safetensors file. It holds only the slots that differ from M0; it is complete or not there.

        With `history`, the file also holds what it takes to take back that many tokens, if this state has it.
        """
        tensors: dict[str, Tensor] = {}
        for place, content in enumerate(self._contents):
            for name, x in content.items():
                if isinstance(x, Memory):
                    merged = x.merged()
                    tensors |= {f"layers.{place}.slots": merged.index, f"layers.{place}.rows": merged.rows}
                else:
                    tensors[f"layers.{place}.{name}"] = x
        written = _last(self._history, history)
        for number, entry in enumerate(written):
            for place, undo in enumerate(entry.undo):
                tensors |= {f"history.{number}.layers.{place}.{name}": x for name, x in undo.tensors().items()}
        counts = [entry.tokens for entry in written]
        state_file.write(path, tensors, self._model_id, self._length, self.pending, counts)

    @classmethod
    def load(cls: type[_State], path: str | PathLike[str], model: nn.Module) -> _State:
        """Read a state that this model, with these weights, has saved. Anything else is refused."""
        model_id = fingerprint(model, again=True)
        tensors, header = state_file.read(path, model_id)
        length, device = header["length"], next(model.parameters()).device
        owned = sum(x.nbytes for x in tensors.values())
        contents: list[Content] = []
        mixers = _mixers(model)
        history = _read_history(path, tensors, header, mixers, device)
        for place, (mixer, layer) in enumerate(
            zip(mixers, state_file.split_layers(path, tensors, len(mixers)), strict=True)
        ):
            example, content = mixer.start_state(0), Content()
            stored = {name: x.to(device) for name, x in layer.items()}
            for name, memory in _tables(mixer).items():
                slots = memory.num_heads * memory.num_slots
                index, rows = state_file.take_slots(path, place, stored, slots, memory.head_dim)
                content[name] = _memory(memory, rows.dtype, (SlotRows(index, rows),))
            expected = {name: x for name, x in example.tensors().items() if name not in content}
            state_file.check_tensors(path, place, stored, expected, length)
            contents.append({**content, **stored})
        return cls(model_id, tuple(contents), length, owned, header["pending"], history)

    def _memories(self) -> dict[int, Memory]:
        """By the index of the layer; a layer has one at most."""
        return {
            place: x for place, content in enumerate(self._contents) for x in content.values() if isinstance(x, Memory)
        }

    def __repr__(self) -> str:
        changed = sum(len(memory.merged().index) for memory in self._memories().values())
        return f"MemoryState(tokens={self._length}, changed_slots={changed}, nbytes={self.nbytes})"


class StatefulLayer(Protocol):
    """A layer, as far as the shapes of its states are concerned."""

    def start_state(self, batch_size: int, /) -> LayerState:
        """Return the state of streams without tokens."""


def _mixers(model: nn.Module) -> Sequence[StatefulLayer]:
    """The layers whose states make up a `MemoryState`."""
    if is_grafted(model):
        from sdm.models.grafted_state import places

        return places(model)
    return mixers_of(model)


def _read(model: nn.Module, cache: Cache) -> tuple[Sequence[StatefulLayer | None], list[LayerState], int, int]:
    """The layers, their states in a cache, its number of rows and the tokens seen."""
    if is_grafted(model):
        from sdm.models.grafted_state import read_cache

        states, rows, length = read_cache(model, cache)
        memories = list(model.memories().values())
        return [*[None] * (len(states) - len(memories)), *memories], states, rows, length
    if not isinstance(cache, SDMCache):
        raise TypeError(f"cache must be an sdm.SDMCache, got {type(cache).__name__}")
    cache.check(base_model(model).config)
    if cache.batch_size == -1:
        raise ValueError("the cache is empty: run the model on some tokens first")
    states = [layer.state for layer in cache.layers if layer.state is not None]
    return _mixers(model), states, cache.batch_size, cache.get_seq_length()


def _tables(mixer: object) -> dict[str, SparseDeltaMemory]:
    """The tensors of a layer's state that are SDM tables, each with the layer that it belongs to."""
    return mixer.sparse_tables() if hasattr(mixer, "sparse_tables") else {}


def _row_of(journal: Journal | None, row: int) -> tuple[Entry, ...]:
    """Copies of the entries of one row."""
    if journal is None or not journal.complete:
        return ()
    return tuple(entry.map(lambda x: x[row : row + 1].clone()) for entry in journal.entries)


def _last(history: tuple[Entry, ...], tokens: int) -> tuple[Entry, ...]:
    """The last entries, up to the one with which `tokens` tokens can be taken back."""
    first, reach = len(history), 0
    while first and reach < tokens:
        first -= 1
        reach += history[first].tokens
    return history[first:]


def _read_history(
    path: str | PathLike[str],
    tensors: dict[str, Tensor],
    header: dict[str, Any],
    mixers: Sequence[StatefulLayer],
    device: torch.device,
) -> tuple[Entry, ...]:
    """Take the undo records out of the tensors of a file."""
    history, counts = [], header["history"]
    if sum(counts) > header["length"] or 0 in counts:
        raise state_file.error(path, f"its history of {sum(counts)} tokens is longer than its stream, or has none")
    for tokens, layers in zip(counts, state_file.split_history(path, tensors, len(counts), len(mixers)), strict=True):
        try:
            undo = [
                mixer.start_state(0).undo_of({name: x.to(device) for name, x in layer.items()})
                for mixer, layer in zip(mixers, layers, strict=True)
            ]
        except (TypeError, KeyError) as cause:
            raise state_file.error(path, "the undo records of its history are not those of this model") from cause
        for record in undo:
            for name, x in record.tensors().items():
                over_time = name.rpartition(".")[2] in record.over_time
                if x.dim() == 0 or len(x) != 1 or (over_time and (x.dim() < 2 or x.shape[1] != tokens)):
                    raise state_file.error(path, f"its history has {name} of shape {list(x.shape)} for {tokens} tokens")
        divisible = not any(isinstance(record, Snapshot) and record.nbytes for record in undo)
        history.append(Entry(next_point(), tokens, divisible, undo))
    return tuple(history)


def _bytes(content: Content, below: Content) -> int:
    """Bytes of a content, without the rows that it shares with the one below."""
    total = 0
    for name, x in content.items():
        under = below.get(name)
        shared = {id(change) for change in under.changes} if isinstance(under, Memory) else set()
        parts = [change for change in x.changes if id(change) not in shared] if isinstance(x, Memory) else [x]
        total += sum(part.nbytes for part in parts)
    return total


def _repeated(x: Tensor | Memory, batch_size: int) -> Tensor:
    if isinstance(x, Memory):
        return x.table().expand(batch_size, *x.shape).contiguous()
    return x.repeat(batch_size, *[1] * (x.dim() - 1))


def _memory(mixer: SparseDeltaMemory, dtype: torch.dtype, changes: tuple[SlotRows, ...]) -> Memory:
    base = None if mixer.initial_state is None else mixer.initial_state.detach()
    shape = (mixer.num_heads, mixer.num_slots, mixer.head_dim)
    return Memory(base, 0 if base is None else base._version, shape, dtype, changes)


def _take_table(mixer: SparseDeltaMemory, table_HND: Tensor, below: Memory | None) -> Memory:
    if below is None or below.dtype != table_HND.dtype:
        below = _memory(mixer, table_HND.dtype, ())
    elif len(below.changes) >= MAX_DEPTH:
        below = replace(below, changes=(below.merged(),))
    width = table_HND.shape[-1]
    now, before = table_HND.detach().reshape(-1, width), below.table().view(-1, width)
    # Bit for bit: a negative zero is a change, an unchanged NaN is none.
    bits = _BITS[now.element_size()]
    index = (now.contiguous().view(bits) != before.view(bits)).any(-1).nonzero().squeeze(1)
    return replace(below, changes=(*below.changes, SlotRows(index, now[index])))


def _take(mixer: StatefulLayer | None, state: LayerState, row: int, below: Content) -> Content:
    """The state of one row: of a table what differs from the one below, of the rest a copy."""
    taken = Content()
    state = state.map(lambda x: x[row : row + 1 or None].detach()).trimmed()
    tables = _tables(mixer)
    for name, x in state.tensors().items():
        under = below.get(name)
        if name in tables:
            taken[name] = _take_table(tables[name], x[0], under if isinstance(under, Memory) else None)
        else:
            taken[name] = x.clone()
    return taken


def _difference(mine: Memory, theirs: Memory) -> SlotChanges:
    index = torch.cat([memory.merged().index for memory in (mine, theirs)]).unique()
    dtype = torch.promote_types(mine.dtype, torch.float32)
    change = (mine.rows_at(index).to(dtype) - theirs.rows_at(index).to(dtype)).norm(dim=-1)
    index, change = index[change != 0], change[change != 0]
    return SlotChanges(index // mine.shape[1], index % mine.shape[1], change)
