"""How a call is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 16  # tokens at most
LONGEST = 16384  # accesses of a token
# Accesses of a chunk, where it has more than one token, and numbers of the memory that a program keeps in registers.
# Backward keeps more of them per row, and twice as much would not fit.
FORWARD = (1024, 8192)
BACKWARD = (512, 2048)


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
    def of(writes: int, reads: int, channels: int, limits: tuple[int, int]) -> Layout:
        accesses, tile = limits
        WP, RP = power(writes), power(reads)
        C = CHUNK
        while C > 1 and accesses < C * (WP + RP):
            C //= 2
        S = max(min(tile // (C * WP), 32, power(channels)), 2)
        RB = min(RP, 16)
        return Layout(C, WP, RP, power(C * (WP + RP)), S, RB, max(min(C * WP * S // 256, 8), 1))
