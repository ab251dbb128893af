"""Random numbers that are functions of their place, so that nothing has to be replayed to get there."""

from __future__ import annotations

import hashlib

import torch


def hash_of(*parts: int | str) -> int:
    """64 bits that depend on every part, the same on every machine."""
    # Names of files that are not UTF-8 are hashed as they are on the disk.
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def generator_of(*parts: int | str) -> torch.Generator:
    """Return a CPU generator whose seed is a hash of the parts."""
    return torch.Generator().manual_seed(hash_of(*parts) >> 1)


def fingerprint_of(config: object, *parts: object) -> str:
    """Return a checksum of a task's configuration, all of its fields included, and of the parts."""
    return hashlib.sha256(repr((config, *parts)).encode()).hexdigest()


class Permutation:
    """A random order of range(size) of which any element costs the same: `permutation[i]`.

    A Feistel network over the next even power of two is a bijection; an image outside the range is mapped again
    until it falls inside, which takes fewer than four rounds on average.
    """

    ROUNDS = 6

    def __init__(self, size: int, *seed: int | str) -> None:
        self.size = size
        self._half = (max(size - 1, 1).bit_length() + 1) // 2
        self._mask = (1 << self._half) - 1
        self._keys = [hash_of(*seed, "round", i) for i in range(self.ROUNDS)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is not in a permutation of {self.size}")
        while True:
            left, right = index >> self._half, index & self._mask
            for key in self._keys:
                left, right = right, left ^ (_mix(right ^ key) & self._mask)
            index = (left << self._half) | right
            if index < self.size:
                return index


def _mix(x: int) -> int:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
