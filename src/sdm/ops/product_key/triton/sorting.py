"""Bitonic selection inside a program: larger keys first and, among equal keys that have ties to break, smaller ties.

A tile of a power of two of numbers is looked at as a hypercube [2, 2, ..., 2]. The partner of a number along one axis
is the sum over that axis minus the number itself, exact in integers that wrap around, and a sum over an axis of two is
a shuffle. (The sort of `triton.language` takes one key of 64 bits; an exact sum with its slot has more.)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bit(i: tl.constexpr, DIMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The coordinate of the i-th innermost axis."""
    return tl.reshape(tl.arange(0, 2), [1] * (DIMS - 1 - i) + [2] + [1] * i)


@triton.jit
def _exchange(key, tie, flip, i: tl.constexpr, DIMS: tl.constexpr, TIED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Put the better of two partners along the i-th innermost axis to the left, or to the right where flip is 1."""
    other = tl.sum(key, DIMS - 1 - i, keep_dims=True) - key
    other_is_better = other > key
    if TIED:
        other_tie = tl.sum(tie, DIMS - 1 - i, keep_dims=True) - tie
        other_is_better |= (other == key) & (other_tie < tie)
    swap = other_is_better != ((flip ^ _bit(i, DIMS)) != 0)
    if TIED:
        tie = tl.where(swap, other_tie, tie)
    return tl.where(swap, other, key), tie


@triton.jit
def _sort_runs(key, tie, STAGE: tl.constexpr, ALTERNATE: tl.constexpr, DIMS: tl.constexpr, TIED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sort each bitonic run of 2**STAGE, all of them best first or, to be merged in pairs, every other one."""
    if ALTERNATE:
        flip = _bit(STAGE, DIMS)
    else:
        flip = 0
    for i in tl.static_range(STAGE):
        key, tie = _exchange(key, tie, flip, STAGE - 1 - i, DIMS, TIED)
    return key, tie


@triton.jit
def _left(x, i: tl.constexpr, DIMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The left half along the i-th innermost axis, which goes away."""
    return tl.sum(tl.where(_bit(i, DIMS) == 0, x, 0), DIMS - 1 - i)


@triton.jit
def best(key, tie, LOG_ROWS: tl.constexpr, LOG_SIZE: tl.constexpr, LOG_KEPT: tl.constexpr, TIED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The best 2**LOG_KEPT of the 2**LOG_SIZE in each row, best first, as (key, tie). Both logarithms are at least 1.

    Without TIED, tie is not looked at and means nothing afterwards.
    """
    DIMS: tl.constexpr = LOG_ROWS + LOG_SIZE
    shape: tl.constexpr = [1 << LOG_ROWS, 1 << LOG_KEPT]
    key = tl.reshape(key, [2] * DIMS)
    if TIED:
        tie = tl.reshape(tie, [2] * DIMS)
    for stage in tl.static_range(1, LOG_KEPT + 1):
        key, tie = _sort_runs(key, tie, stage, stage < LOG_SIZE, DIMS, TIED)
    # Of two sorted runs in opposite directions, the better at each place are the best of both, and bitonic again.
    for merged in tl.static_range(LOG_SIZE - LOG_KEPT):
        key, tie = _exchange(key, tie, 0, LOG_KEPT, DIMS - merged, TIED)
        key = _left(key, LOG_KEPT, DIMS - merged)
        if TIED:
            tie = _left(tie, LOG_KEPT, DIMS - merged)
        key, tie = _sort_runs(key, tie, LOG_KEPT, merged + 1 < LOG_SIZE - LOG_KEPT, DIMS - merged - 1, TIED)
    if TIED:
        tie = tl.reshape(tie, shape)
    return tl.reshape(key, shape), tie
