"""Tables that share rows: every stream owns the rows that it has written, and nothing else.

The rows of all streams of a layer lie in one tensor, the pool, whose first H * N rows are the layer's initial table. A
stream has a map from slots to rows of the pool. A row that several streams share, or that belongs to the initial table,
is copied when it is first written. Forking a stream copies its map; joining or leaving a batch copies nothing. One call
of the op serves all streams: after translation their tokens are a sequence over the pool in which no token sees what
another stream has written.

Shapes: S streams, T time, H heads, N slots, D value channels, W writes, P rows of the pool, M maps.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sdm.layers.sparse_delta_memory import MemoryTable, SparseDeltaMemory, TableState, TableWrites
from sdm.layers.state import LayerState
from sdm.ops import sparse_delta_rule_
from sdm.ops.sparse_delta_rule.inputs import Tokens

# A pool changes its size rarely, because all rows are copied then, those of the initial table too. A full pool gets
# half as many rows again, and 1/16 of a table at least. It shrinks when streams use less than a quarter of rows that
# are more than a quarter of a table.
LEAST_GROWTH, SHRINK_BELOW = 16, 4
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowPool:
    """The rows of all streams of one layer.

    Args:
        table_HND: the initial table; it is copied.
    """

    def __init__(self, table_HND: Tensor) -> None:
        H, N, D = table_HND.shape
        self.shape = (H, N, D)
        self.rows = table_HND.detach().reshape(H * N, D).clone()  # [P,D]
        device = table_HND.device
        # How many maps name a row; rows of the initial table count as shared for ever.
        self._uses = torch.full((H * N,), 2, dtype=torch.int32, device=device)
        self._free = torch.zeros(0, dtype=torch.int64, device=device)
        self._maps = torch.zeros(0, H * N, dtype=torch.int32, device=device)  # [M,H*N]
        self._free_maps: list[int] = []
        self._closed: list[int] = []
        self._start = torch.arange(H * N, dtype=torch.int32, device=device)
        self._head = torch.arange(H, device=device)[:, None] * N

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self.shape[2] * self.rows.element_size()

    @property
    def map_nbytes(self) -> int:
        """Bytes of the map of one stream."""
        return self._start.nbytes

    @property
    def used_rows(self) -> int:
        """Rows that streams have written."""
        return len(self.rows) - len(self._start) - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, with free rows and without the initial table."""
        return (len(self.rows) - len(self._start)) * self.row_nbytes + self._maps.nbytes + self._uses.nbytes

    def open(self, source: Table | None = None) -> Table:
        """Return the table of a new stream: the initial one, or one that shares every row with `source`."""
        self.collect()
        if not self._free_maps:
            count = len(self._maps)
            more = max(4, count // 2)
            self._maps = torch.cat((self._maps, self._maps.new_zeros(more, self._maps.shape[1])))
            self._free_maps = list(range(count + more - 1, count - 1, -1))
        number = self._free_maps.pop()
        if source is None:
            self._maps[number] = self._start
        else:
            self._maps[number] = self._maps[source.number]
            written = self._written(source.number)
            self._uses[written] += 1
        return Table(self, number)

    def close(self, number: int) -> None:
        """Note that the stream with this map is gone; `collect` gives back what it had.

        The garbage collector calls this, at any time.
        """
        self._closed.append(number)

    def collect(self) -> None:
        """Give back the maps of streams that are gone, and the rows that no other stream shares."""
        if not self._closed:
            return
        while self._closed:
            number = self._closed.pop()
            written = self._written(number)
            self._uses[written] -= 1
            self._free = torch.cat((self._free, written[self._uses[written] == 0]))
            self._free_maps.append(number)
        first, used = len(self._start), self.used_rows
        own = len(self.rows) - first
        if own > first // SHRINK_BELOW and used < own // SHRINK_BELOW:
            self._shrink(used + max(used // 2, first // LEAST_GROWTH))

    def _written(self, number: int) -> Tensor:
        """The rows of a stream that are not those of the initial table."""
        row = self._maps[number]
        return row[row >= len(self._start)].long()

    def counts(self, number: int) -> tuple[int, int]:
        """How many rows a stream has written, and how many of them no other stream shares."""
        written = self._written(number)
        return len(written), int((self._uses[written] == 1).sum())

    def _take(self, count: int) -> Tensor:
        """Take rows out of the free ones; there are more if need be."""
        short = count - len(self._free)
        if short > 0:
            before = len(self.rows)
            own = before - len(self._start)
            more = max(short, own // 2, len(self._start) // LEAST_GROWTH)
            rows = self.rows.new_empty(before + more, self.shape[2])  # on a CPU, rows not used yet take no memory
            rows[:before] = self.rows
            self.rows = rows
            self._uses = torch.cat((self._uses, self._uses.new_zeros(more)))
            added = torch.arange(before, before + more, device=self.rows.device)
            self._free = torch.cat((self._free, added))
        taken, self._free = self._free[len(self._free) - count :], self._free[: len(self._free) - count]
        return taken

    def _shrink(self, own: int) -> None:
        """Keep room for `own` rows of streams; those in use move to the front, and the maps follow."""
        first = len(self._start)
        in_use = self._uses.nonzero().squeeze(1)
        rows, uses = self.rows.new_empty(first + own, self.shape[2]), self._uses.new_zeros(first + own)
        rows[: len(in_use)], uses[: len(in_use)] = self.rows[in_use], self._uses[in_use]
        place = self._start.new_zeros(len(self.rows))  # maps that are free name rows that are gone
        place[in_use] = torch.arange(len(in_use), dtype=place.dtype, device=place.device)
        self.rows, self._uses, self._maps = rows, uses, place[self._maps.long()]
        self._free = torch.arange(len(in_use), len(rows), device=rows.device)
        if len(self._free_maps) == len(self._maps):
            self._maps, self._free_maps = self._maps[:0].clone(), []

    def own_(self, numbers_S: Tensor, slots_SK: Tensor) -> None:
        """Let the streams own these slots of [0, H * N): rows that they share are copied. A slot may occur twice."""
        self.collect()
        flat = self._maps.view(-1)
        entry = (numbers_S[:, None] * self._maps.shape[1] + slots_SK).flatten()
        entry = entry[self._uses[flat[entry].long()] > 1]
        if not len(entry):
            return
        entry = entry.unique()
        rows = flat[entry].long()
        new = self._take(len(rows))
        self.rows[new] = self.rows[rows]
        self._uses[new] = 1
        shared = rows[rows >= len(self._start)]
        self._uses.index_add_(0, shared, self._uses.new_full((len(shared),), -1))
        # Streams that shared a row with nobody else both copied it: nobody names it now.
        gone = shared.unique()
        self._free = torch.cat((self._free, gone[self._uses[gone] == 0]))
        flat[entry] = new.to(flat.dtype)

    def translate(self, numbers_S: Tensor, index_STHK: Tensor) -> Tensor:
        """The rows of the pool for slots of each stream and head."""
        slots = (index_STHK + self._head).flatten(1)
        return self._maps.view(-1)[numbers_S[:, None] * self._maps.shape[1] + slots].view(index_STHK.shape).long()

    def slots_of(self, index_STHK: Tensor) -> Tensor:
        """Number the slots of all heads through: [S, T * H * K]."""
        return (index_STHK + self._head).flatten(1)

    def table(self, number: int) -> Tensor:
        """The whole table of a stream, [H,N,D], newly made."""
        return self.rows[self._maps[number].long()].view(self.shape)

    def load_(self, number: int, table_HND: Tensor) -> None:
        """Set a stream to a table. It owns the rows that differ from its own, bit for bit."""
        new = table_HND.to(self.rows.dtype).reshape(-1, self.shape[2])
        own = self.rows[self._maps[number].long()]
        bits = _BITS[new.element_size()]
        slots = (new.contiguous().view(bits) != own.view(bits)).any(-1).nonzero().squeeze(1)
        self.own_(torch.tensor([number], device=slots.device), slots[None])
        self.rows[self._maps[number, slots].long()] = new[slots]


class Table:
    """The table of one stream in a pool. It is given back when nobody refers to it any more."""

    def __init__(self, pool: RowPool, number: int) -> None:
        self.pool, self.number = pool, number
        self._finalizer = weakref.finalize(self, pool.close, number)
        self._finalizer.atexit = False

    def fork(self) -> Table:
        """Return the table of another stream that shares every row with this one."""
        return self.pool.open(self)


@dataclasses.dataclass
class PooledTable(TableState):
    """The state of a Sparse Delta Memory whose streams have their rows in a pool."""

    tables: tuple[Table, ...]

    @property
    def pool(self) -> RowPool:
        """The pool of all streams."""
        return self.tables[0].pool

    def tensors(self) -> dict[str, Tensor]:
        """Return the numbers [S] of the streams' maps."""
        return {"tables": self._numbers()}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> PooledTable:
        """Return the state of some of the streams. One that is named twice is forked."""
        known = {table.number: table for table in self.tables}
        tables = [known[number] for number in tensors["tables"].tolist()]
        return PooledTable(
            tuple(table.fork() if table in tables[:place] else table for place, table in enumerate(tables))
        )

    def stacked(self, others: Sequence[PooledTable]) -> PooledTable:
        """Return the state of all streams; no row is copied."""
        tables = self.tables + tuple(table for other in others for table in other.tables)
        if any(table.pool is not self.pool for table in tables):
            raise ValueError("these streams are of models with different initial tables: they cannot share a batch")
        return PooledTable(tables)

    def fork(self) -> PooledTable:
        """Return a state that goes its own way from here, and shares all rows."""
        return PooledTable(tuple(table.fork() for table in self.tables))

    @property
    def streams(self) -> int:
        """Number of streams."""
        return len(self.tables)

    @property
    def nbytes(self) -> int:
        """Bytes of the maps, and of the rows that the streams have written and share with no other stream."""
        own = sum(self.pool.counts(table.number)[1] for table in self.tables)
        return own * self.pool.row_nbytes + self.streams * self.pool.map_nbytes

    def check(self, streams: int, shape: tuple[int, int, int], device: torch.device) -> None:
        """Raise unless this is the state of so many streams with tables of this shape [H,N,D]."""
        if self.pool.shape != shape or self.streams != streams:
            raise ValueError(
                f"state must have {streams} streams with tables of shape {list(shape)}, got {self.streams} with "
                f"{list(self.pool.shape)}"
            )

    def undo(self, tokens: Tokens) -> PooledUndo:
        """Record the tables by forking them."""
        return PooledUndo(*tokens[:5], self.fork())

    def write_and_read_(self, tokens: Tokens, update: str, backend: str) -> Tensor:
        """Write and read tokens [S,T,H,...] in place: readings [S,T,H,D]."""
        pool, numbers = self.pool, self._numbers()
        pool.own_(numbers, pool.slots_of(tokens.write_index))
        as_one_sequence = [x.flatten(0, 2)[None, :, None] for x in tokens]
        write_index, write_weight, value, beta, log_decay, read_index, read_weight = as_one_sequence
        write_index = pool.translate(numbers, tokens.write_index).view_as(write_index)
        read_index = pool.translate(numbers, tokens.read_index).view_as(read_index)
        y = sparse_delta_rule_(
            pool.rows[None, None],
            *(write_index, write_weight, value, beta, log_decay, read_index, read_weight),
            update=update,
            backend=backend,
        )
        return y.view(tokens.value.shape)

    def _numbers(self) -> Tensor:
        return torch.tensor([table.number for table in self.tables], device=self.pool.rows.device)


@dataclasses.dataclass
class PooledUndo(TableWrites):
    """Forks of the tables before the tokens, and the writes themselves."""

    before: PooledTable

    def restore_(self, state: PooledTable) -> None:
        """Set the state to the forks."""
        state.tables = self.before.tables

    def first(self, tokens: int) -> PooledUndo:
        """Return the record of the first tokens, with forks of its own: those of this one are restored."""
        parts = {name: getattr(self, name)[:, :tokens] for name in self.over_time}
        return PooledUndo(**parts, before=self.before.fork())

    @property
    def nbytes(self) -> int:
        """Bytes of the maps, of the rows that the tokens make the streams copy at most, and of the writes."""
        pool = self.before.pool
        rows = self.write_index.numel() * pool.row_nbytes + self.before.streams * pool.map_nbytes
        return rows + sum(getattr(self, name).nbytes for name in self.over_time)


_pools: weakref.WeakKeyDictionary[SparseDeltaMemory, tuple[Any, RowPool]] = weakref.WeakKeyDictionary()


def pool_of(layer: SparseDeltaMemory) -> RowPool:
    """Return the pool that the streams of a layer share. A layer whose initial table has changed has a new one."""
    start = layer.initial_state
    weight = layer.value_proj.weight
    version = (weight.device, weight.dtype) if start is None else (start.data_ptr(), start._version, start.dtype)
    if layer not in _pools or _pools[layer][0] != version:
        _pools[layer] = (version, RowPool(layer.start_state(1).memory[0]))
    return _pools[layer][1]


def pooled(state: LayerState, layer: SparseDeltaMemory) -> LayerState:
    """Return the state of a layer with its tables in the pool of `layer`, the sparse memory within."""
    if isinstance(state, MemoryTable):
        pool = pool_of(layer)
        tables = tuple(pool.open() for _ in range(state.streams))
        for table, content in zip(tables, state.memory, strict=True):
            pool.load_(table.number, content)
        return PooledTable(tables)
    return _mapped(state, lambda part: pooled(part, layer))


def start_pooled(state: LayerState, layer: SparseDeltaMemory) -> LayerState:
    """Return the state of a new stream, given that of no stream at all: no table is made. Other tensors start at zero.

    Args:
        state: `start_state(0)` of the layer.
        layer: the sparse memory within.
    """
    if isinstance(state, MemoryTable):
        return PooledTable((pool_of(layer).open(),))
    return _mapped(state, lambda part: start_pooled(part, layer), lambda x: x.new_zeros(1, *x.shape[1:]))


def dense(state: LayerState) -> LayerState:
    """Return the state with whole tables instead of those in a pool."""
    if isinstance(state, PooledTable):
        return MemoryTable(torch.stack([state.pool.table(table.number) for table in state.tables]))
    return _mapped(state, dense)


def forked(state: LayerState) -> LayerState:
    """Return a copy of a state that shares the rows of tables in a pool."""
    return state.fork() if isinstance(state, PooledTable) else _mapped(state, forked, torch.clone)


def pooled_tables(state: LayerState) -> list[PooledTable]:
    """Return the tables in a pool that a state has."""
    if isinstance(state, PooledTable):
        return [state]
    parts = (getattr(state, field.name) for field in dataclasses.fields(state))
    return [table for part in parts if isinstance(part, LayerState) for table in pooled_tables(part)]


def _mapped(
    state: LayerState, of_state: Callable[[LayerState], LayerState], of_tensor: Callable[[Tensor], Tensor] | None = None
) -> LayerState:
    """Apply functions to the states and the tensors that a state is made of."""
    parts: dict[str, Any] = {}
    for field in dataclasses.fields(state):
        part = getattr(state, field.name)
        if isinstance(part, LayerState):
            part = of_state(part)
        elif of_tensor is not None:
            part = of_tensor(part)
        parts[field.name] = part
    return type(state)(**parts)
