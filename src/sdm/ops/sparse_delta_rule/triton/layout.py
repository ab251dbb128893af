"""How a call is cut into programs.

A program owns S channels of a sequence and walks its chunks of C tokens. It keeps the rows that a chunk writes in
registers, 16 numbers of a tile [C,W,S] in each thread. What limits it is waiting: for memory, and for its own warps at
barriers. Two layouts wait less, by the latency model of benchmarks/triton_model.py:

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
MANY = 512  # programs: more than the multiprocessors of a large GPU take at once with the first layout
NUMBERS = 512  # of a tile, in a warp
SECTOR = 8  # channels of float32 that memory moves at once


class Accesses(NamedTuple):
    """Writes and reads of a chunk at most, where it has more than one token."""

    few: int
    many: int


# Backward keeps more per row.
FORWARD = Accesses(1024, 256)
BACKWARD = Accesses(512, 128)


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
    RB: int  # reads at a time
    warps: int

    @property
    def options(self) -> dict[str, int | bool]:
        """Options of the launch.

        Where threads are more than numbers, several of them compute the same sum. Their results must not differ, since
        hardware chooses whose is stored: a product that is fused into a sum is not rounded in one thread and rounded in
        the others.
        """
        return {"num_warps": self.warps, "enable_fp_fusion": min(self.WP, self.RP) >= 32}

    @staticmethod
    def of(writes: int, reads: int, channels: int, accesses: int) -> Layout:
        """The layout for chunks of so many accesses."""
        WP, RP = power(writes), power(reads)
        C = CHUNK
        while C > 1 and accesses < C * (WP + RP):
            C //= 2
        tile = 4 * accesses
        S = max(tile // (C * WP), 2)
        if C * WP * SECTOR <= 8192:
            S = max(S, SECTOR)
        S = max(min(S, 32, power(channels)), 2)
        RB = min(RP, max(tile // (C * S), 16))
        return Layout(C, WP, RP, power(C * (WP + RP)), S, RB, max(min(C * max(WP, RB) * S // NUMBERS, 16), 1))

    @staticmethod
    def for_streams(writes: int, reads: int, channels: int, limits: Accesses, streams: int) -> Layout:
        """The layout of a call with so many sequences and heads."""
        many = Layout.are_many(writes, reads, channels, limits, streams)
        return Layout.of(writes, reads, channels, limits.many if many else limits.few)

    @staticmethod
    def are_many(writes: int, reads: int, channels: int, limits: Accesses, streams: int) -> bool:
        """Whether such a call has many programs."""
        return streams * -(-channels // Layout.of(writes, reads, channels, limits.many).S) >= MANY


@contextmanager
def chosen(many: bool) -> Iterator[None]:
    """Use the layout for many programs, or for few, whatever the size of a call: for tests and models."""
    global MANY
    before, MANY = MANY, 0 if many else 2**31
    try:
        yield
    finally:
        MANY = before
