"""Which source each row comes from, by weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from sdm.data.errors import DataError
from sdm.data.randomness import generator_of

BLOCK = 1024


def shares(weights: Sequence[float], size: int) -> list[int]:
    """How many of `size` places each weight gets: the nearest whole numbers that add up (largest remainders)."""
    exact = [size * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    return counts


class Mixture:
    """Deals the numbers 0, 1, 2, ... to sources; `deal(i)` tells the source and how many it was dealt before.

    Numbers are dealt in blocks. Each block gives every source its share in an order of its own, so that the count
    before a number is the share times the blocks before, plus a look into one block: no replay.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._shares = shares(weights, BLOCK if len(weights) > 1 else 1)
        for i, share in enumerate(self._shares):
            if share == 0:
                raise DataError(f"weights[{i}] = {weights[i]} is less than 1/{BLOCK} of all weights; raise it")
        self._size = sum(self._shares)
        self._block = lru_cache(maxsize=2)(lambda block: self._shuffled(seed, block))

    def deal(self, index: int) -> tuple[int, int]:
        block, place = divmod(index, self._size)
        source, before = self._block(block)[place]
        return source, block * self._shares[source] + before

    def _shuffled(self, seed: int, block: int) -> list[tuple[int, int]]:
        places = torch.tensor([i for i, share in enumerate(self._shares) for _ in range(share)])
        places = places[torch.randperm(self._size, generator=generator_of(seed, "mixture", block))]
        counts = [0] * len(self._shares)
        dealt = []
        for source in places.tolist():
            dealt.append((source, counts[source]))
            counts[source] += 1
        return dealt
