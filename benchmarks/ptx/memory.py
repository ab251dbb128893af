"""Global and shared memory of an emulated GPU, with bounds and races checked.

Two accesses to a cell race if different warps of a block make them without a barrier in between, or different blocks of
a launch make them, and one of them is a write. Threads that write the same value at once do not race: a layout that
replicates a value stores it so. If they write different values, hardware chooses one of them: that counts as a race.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
SHIFT = 40  # an address is the number of an allocation, and 40 bits of offset
_MANY = -2  # readers


class Fault(Exception):
    """An access that a GPU would not survive, or an instruction that the emulator does not know."""


@dataclass
class Races:
    """Races by kind, buffer and source line."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def add(self, kind: str, buffer: str, source: str, number: int) -> None:
        """Count `number` cells of a buffer on which an access of this source line raced."""
        if number:
            self.counts[kind, buffer, source] += number


class Buffer:
    """Bytes, and for each cell of them who touched it last.

    Args:
        data: the bytes, shared with whoever owns them.
        name: for messages.
        cell: bytes of the smallest access; races are looked for between cells.
        start: offset of the first byte, which keeps the alignment of the owner's memory.
    """

    def __init__(self, data: NDArray[np.uint8], name: str, cell: int, start: int = 0) -> None:
        self.data, self.name, self.cell, self.start = data, name, cell, start
        cells = -(-len(data) // cell)
        self.written = np.full(cells, -1, np.int64)  # moment of the last write
        self.writer = np.full(cells, -1, np.int16)  # its warp
        self.seen = np.full(cells, -1, np.int64)  # moment of the last read
        self.reader = np.full(cells, -1, np.int16)
        self._views: dict[int, Array] = {}

    def view(self, size: int) -> Array:
        """The memory as unsigned numbers of `size` bytes."""
        if size not in self._views:
            self._views[size] = self.data[: len(self.data) // size * size].view(f"u{size}")
        return self._views[size]

    def check_bounds(self, offset: NDArray[np.int64], size: int, what: str) -> None:
        """Raise Fault for accesses of `size` bytes that are outside of the buffer or not aligned."""
        outside = (offset < 0) | (offset + size > len(self.data))
        if outside.any():
            raise Fault(
                f"out of bounds: {self.name} has {len(self.data)} bytes, "
                f"offset {offset[outside][0]} size {size}, {what}"
            )
        if ((offset + self.start) % size).any():
            raise Fault(f"misaligned: {self.name}, offset {offset[0]}, size {size}, {what}")

    def cells(self, offset: NDArray[np.int64], size: int, warp: NDArray[np.int16]) -> tuple[Array, Array]:
        """Cells of accesses of `size` bytes, and the warp that makes each."""
        count = max(size // self.cell, 1)
        if count == 1:
            return offset // self.cell, warp
        at = (offset // self.cell)[:, None] + np.arange(count)
        return at.reshape(-1), np.repeat(warp, count)

    def note_read(self, at: Array, warp: Array, now: int, block: int, launch: int, races: Races, source: str) -> None:
        """Check and remember reads at the moment `now` of a block and launch that began at the given moments."""
        written = self.written[at]
        races.add("read after write", self.name, source, int(((written == now) & (self.writer[at] != warp)).sum()))
        races.add("between blocks", self.name, source, int(((written >= launch) & (written < block)).sum()))
        known = (self.seen[at] == now) & (self.reader[at] != warp)
        self.seen[at] = now
        self.reader[at] = warp
        shared = known | (self.reader[at] != warp)
        self.reader[at[shared]] = _MANY

    def note_write(
        self, at: Array, warp: Array, same: Array, now: int, block: int, launch: int, races: Races, source: str
    ) -> None:
        """The same for writes. `same` marks those that found their value when all warps had written."""
        written, seen = self.written[at], self.seen[at]
        races.add("write after write", self.name, source, int(((written == now) & (self.writer[at] != warp)).sum()))
        races.add("write after read", self.name, source, int(((seen == now) & (self.reader[at] != warp)).sum()))
        before = ((written >= launch) & (written < block)) | ((seen >= launch) & (seen < block))
        races.add("between blocks", self.name, source, int(before.sum()))
        self.written[at] = now
        self.writer[at] = warp
        races.add("different values at once", self.name, source, int((~same).sum()))


class Memory:
    """Allocations, by the upper bits of an address."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def add(self, data: NDArray[np.uint8], name: str, cell: int) -> int:
        """Map the bytes of a tensor. Returns their address, which is aligned as they are."""
        start = int(data.__array_interface__["data"][0]) % 256 if len(data) else 0
        self.buffers.append(Buffer(data, name, cell, start))
        return (len(self.buffers) << SHIFT) + start

    def split(self, address: NDArray[np.uint64], what: str) -> list[tuple[Buffer, Array, NDArray[np.int64]]]:
        """For each buffer that is accessed: the positions among the addresses, and their offsets."""
        number = (address >> np.uint64(SHIFT)).astype(np.int64) - 1
        offset = (address & np.uint64((1 << SHIFT) - 1)).astype(np.int64)
        parts = []
        for which in np.unique(number):
            if not 0 <= which < len(self.buffers):
                wild = int(address[number == which][0])
                raise Fault(f"out of bounds: address {wild:#x} belongs to no tensor, {what}")
            position = np.nonzero(number == which)[0]
            buffer = self.buffers[which]
            parts.append((buffer, position, offset[position] - buffer.start))
        return parts
