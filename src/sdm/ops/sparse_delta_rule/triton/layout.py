"""How a call is cut into programs.

A program owns S channels of a sequence and walks its chunks of C tokens. It keeps the rows that a chunk writes in
registers, 16 numbers of a tile [C,W,S] in each thread. What limits it is waiting: for memory, and for its own warps at
barriers. Backward takes one token at a time. Three layouts let forward wait less, by the latency model of
benchmarks/triton_model.py:

- Fewest programs: each has a multiprocessor of its own and may take all of its registers. The largest chunks.
- Few programs: large chunks, so that a program asks for many rows at once. The multiprocessors are not full, and a
  program should be done as soon as possible.
- Many programs: small chunks and few warps. A multiprocessor has many programs at a time, which wait in parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

CHUNK = 16  # tokens at most
LONGEST = 16384  # accesses of a token
FEWEST = 108  # programs at most: the multiprocessors of an A100
MANY = 512  # programs at least: more than the multiprocessors of a large GPU take at once with the layout for few
NUMBERS = 512  # of a tile, in a warp
REGISTERS = 65536  # of a multiprocessor
SECTOR = 8  # channels of float32 that memory moves at once


class Accesses(NamedTuple):
    """Writes and reads of a chunk at most, where it has more than one token."""

    fewest: int
    few: int
    many: int


FORWARD = Accesses(2048, 1024, 256)
BACKWARD = Accesses(1, 1, 1)  # a token
_forced: str | None = None


def power(x: int) -> int:
    """The next power of two."""
    return 1 << (x - 1).bit_length()


@dataclass(frozen=True)
class Layout:
    """The sizes that kernels are compiled for."""

    C: int  # tokens of a chunk
    WP: int  # W and R, rounded up to powers of two
    RP: int
    J: int  # accesses of a chunk, rounded up
    S: int  # channels of a program
    warps: int

    @property
    def options(self) -> dict[str, int | bool]:
        """Options of the launch.

        Where threads are more than numbers, several of them compute the same sum. Their results must not differ, since
        hardware chooses whose is stored: a product that is fused into a sum is not rounded in one thread and rounded in
        the others.
        """
        return {"num_warps": self.warps, "enable_fp_fusion": min(self.WP, self.RP) >= 32}

    @property
    def most_registers(self) -> int | None:
        """Registers of a thread in forward, so that two blocks of 8 warps share a multiprocessor; None: any number."""
        return REGISTERS // (2 * 8 * 32) if self.warps == 8 else None

    @staticmethod
    def of(writes: int, reads: int, channels: int, accesses: int) -> Layout:
        """The layout for chunks of so many accesses."""
        WP, RP = power(writes), power(reads)
        C = CHUNK
        while C > 1 and accesses < C * (WP + RP):
            C //= 2
        rows, tile = C * max(WP, RP), 4 * accesses
        S = max(tile // rows, 2)
        if rows * SECTOR <= 8192:
            S = max(S, SECTOR)
        S = max(min(S, 32, power(channels)), 2)
        return Layout(C, WP, RP, power(C * (WP + RP)), S, max(min(rows * S // NUMBERS, 16), 1))

    @staticmethod
    def for_streams(writes: int, reads: int, channels: int, limits: Accesses, streams: int) -> Layout:
        """The layout of a call with so many sequences and heads."""
        name = Layout.name(writes, reads, channels, limits, streams)
        return Layout.of(writes, reads, channels, getattr(limits, name))

    @staticmethod
    def name(writes: int, reads: int, channels: int, limits: Accesses, streams: int) -> str:
        """Which layout such a call has, by the number of its programs: a field of `Accesses`."""
        if _forced is not None:
            return _forced
        fewest, few, many = (Layout.of(writes, reads, channels, limit) for limit in limits)
        if streams * -(-channels // many.S) >= MANY:
            return "many"
        # Where a chunk cannot be larger a program would have more channels, and programs would be fewer still.
        if fewest.S <= few.S and streams * -(-channels // fewest.S) <= FEWEST:
            return "fewest"
        return "few"


@contextmanager
def chosen(name: str) -> Iterator[None]:
    """Use the layout of this name, whatever the size of a call: for tests and models."""
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before
