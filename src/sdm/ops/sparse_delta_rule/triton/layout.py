"""How a call is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 16  # tokens at most
SORTED = 1024  # accesses of a chunk, where it has more than one token
LONGEST = 16384  # accesses of a token
FORWARD_TILE = 8192  # numbers of the memory that a program keeps in registers
BACKWARD_TILE = 4096


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

    @staticmethod
    def of(writes: int, reads: int, channels: int, tile: int) -> Layout:
        WP, RP = power(writes), power(reads)
        C = CHUNK
        while C > 1 and C * (WP + RP) > SORTED:
            C //= 2
        S = max(min(tile // (C * WP), 32, power(channels)), 2)
        RB = max(min(RP, 2048 // (C * S)), 1)
        return Layout(C, WP, RP, power(C * (WP + RP)), S, RB, max(min(C * WP * S // 512, 8), 1))
