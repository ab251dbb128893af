"""The kernels of product-key selection: one sorts halves, one the sums that can win, one adds up gradients.

n scores per half, k selected slots; a program takes a few rows. Sizes of tiles are powers of two, given by their
logarithms.

Selection is bitonic inside a program: larger keys first and, among equal keys that have ties to break, smaller ties. A
tile of a power of two of numbers is looked at as a hypercube [2, 2, ..., 2]. The partner of a number along one axis is
the sum over that axis minus the number itself, exact in integers that wrap around, and a sum over an axis of two is a
shuffle. (The sort of `triton.language` takes one key of 64 bits; an exact sum with its slot has more.)

In the gradient, each score adds up the gradients of the slots that it is part of, in their order. A slot is found by
comparing, so that nothing is added atomically and the result does not depend on who comes first.
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


LARGEST = tl.constexpr(1.7014117331926443e38)  # half of the largest float32, as in reference.py
NOTHING = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # a key below that of every sum


@triton.jit
def _to_ordered(x):  # type: ignore[no-untyped-def]
    """Integers that compare like the floats, which are finite. Zeros become equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_ordered(bits):  # type: ignore[no-untyped-def]
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rank_halves_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,  # [halves, n]
    ranked_ptr,  # [halves, 2**LOG_KEPT], written: the best of each half, both its order and where it is
    halves,
    n: tl.constexpr,
    LOG_ROWS: tl.constexpr,
    LOG_N: tl.constexpr,  # n <= 2**LOG_N
    LOG_KEPT: tl.constexpr,  # min(n, k) <= 2**LOG_KEPT
):
    """Rank the scores of each half and keep those that can be selected."""
    half = tl.program_id(0).to(tl.int64) * (1 << LOG_ROWS) + tl.arange(0, 1 << LOG_ROWS)[:, None]
    i = tl.arange(0, 1 << LOG_N)[None, :]
    x = tl.load(scores_ptr + half * n + i, mask=(half < halves) & (i < n), other=0.0).to(tl.float32)
    x = tl.where(x != x, LARGEST, x)
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    # The score above, the index below it, so that the lower index is the larger key among equal scores.
    key = tl.where(i < n, (_to_ordered(x).to(tl.int64) << 32) + (0x7FFFFFFF - i), NOTHING)
    key, _ = best(key, key, LOG_ROWS, LOG_N, LOG_KEPT, TIED=False)
    place = tl.arange(0, 1 << LOG_KEPT)[None, :]
    tl.store(ranked_ptr + half * (1 << LOG_KEPT) + place, key, mask=half < halves)


@triton.jit
def _of_rank(ranked_ptr, rank, mask):  # type: ignore[no-untyped-def]
    """The score of this rank and its index."""
    key = tl.load(ranked_ptr + rank, mask=mask, other=0)
    return _from_ordered((key >> 32).to(tl.int32)), 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _candidates(ranks, n: tl.constexpr, k: tl.constexpr, LOG_PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pairs of ranks (a, b) with (a + 1)(b + 1) <= k, one after the other: a, b, and whether there is one."""
    pair = tl.arange(0, 1 << LOG_PAIRS)
    a = tl.zeros_like(pair)
    start = tl.zeros_like(pair)
    end = 0
    for rank in range(ranks):
        end += tl.minimum(k // (rank + 1), n)
        a = tl.where(pair >= end, rank + 1, a)
        start = tl.where(pair >= end, end, start)
    exists = pair < end
    return tl.where(exists, a, 0), tl.where(exists, pair - start, 0), exists


@triton.jit
def select_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,  # [rows, 2n]
    ranked_ptr,  # [rows, 2, 2**LOG_KEPT]
    values_ptr,  # [rows, k], written
    index_ptr,  # [rows, k], written
    rows,
    ranks,  # min(n, k); a constant would be unrolled
    n: tl.constexpr,
    k: tl.constexpr,
    LOG_ROWS: tl.constexpr,
    LOG_KEPT: tl.constexpr,
    LOG_PAIRS: tl.constexpr,  # candidate pairs <= 2**LOG_PAIRS
    LOG_K: tl.constexpr,  # k <= 2**LOG_K
):
    """Select the k best of the candidate pairs of each row, in ascending order of their slots."""
    row = tl.program_id(0).to(tl.int64) * (1 << LOG_ROWS) + tl.arange(0, 1 << LOG_ROWS)[:, None]
    inside = row < rows
    a, b, exists = _candidates(ranks, n, k, LOG_PAIRS)
    a, b, exists = a[None, :], b[None, :], exists[None, :]
    x, x_at = _of_rank(ranked_ptr + row * (2 << LOG_KEPT), a, inside & exists)
    y, y_at = _of_rank(ranked_ptr + row * (2 << LOG_KEPT) + (1 << LOG_KEPT), b, inside & exists)
    # The exact sum, as in reference.py: rounded + error.
    rounded = x + y
    y_part = rounded - x
    error = (x - (rounded - y_part)) + (y - y_part)
    key = (_to_ordered(rounded).to(tl.int64) << 32) + (_to_ordered(error).to(tl.int64) + 0x80000000)
    key = tl.where(exists, key, NOTHING)
    _, slot = best(key, x_at * n + y_at, LOG_ROWS, LOG_PAIRS, LOG_K, TIED=True)

    place = tl.arange(0, 1 << LOG_K)[None, :]
    negative, _ = best(tl.where(place < k, -slot, -0x7FFFFFFF), slot, LOG_ROWS, LOG_K, LOG_K, TIED=False)
    slot = -negative
    wanted = inside & (place < k)
    half_ptr = scores_ptr + row * (2 * n)
    value = tl.load(half_ptr + slot // n, mask=wanted, other=0.0).to(tl.float32)
    value += tl.load(half_ptr + n + slot % n, mask=wanted, other=0.0).to(tl.float32)
    tl.store(values_ptr + row * k + place, value, mask=wanted)
    tl.store(index_ptr + row * k + place, slot.to(tl.int64), mask=wanted)


@triton.jit
def gather_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_values_ptr,  # [rows, k]
    index_ptr,  # [rows, k]
    grad_scores_ptr,  # [rows, 2n], written
    rows,
    n: tl.constexpr,
    k: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add up the gradients of the selected sums for each score of both halves."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    for start in range(0, n, BLOCK_N):
        i = start + tl.arange(0, BLOCK_N)[None, :]
        first = tl.zeros([ROWS, BLOCK_N], tl.float32)
        second = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for place in range(0, k, BLOCK_K):
            at = place + tl.arange(0, BLOCK_K)[None, :]
            grad = tl.load(grad_values_ptr + row * k + at, mask=inside & (at < k), other=0.0).to(tl.float32)
            slot = tl.load(index_ptr + row * k + at, mask=inside & (at < k), other=-1).to(tl.int32)
            in_first = (slot // n)[:, None, :] == i[:, :, None]
            in_second = (slot % n)[:, None, :] == i[:, :, None]
            first += tl.sum(tl.where(in_first, grad[:, None, :], 0.0), 2)
            second += tl.sum(tl.where(in_second, grad[:, None, :], 0.0), 2)
        wanted = inside & (i < n)
        out = grad_scores_ptr + row * (2 * n) + i
        tl.store(out, first.to(grad_scores_ptr.dtype.element_ty), mask=wanted)
        tl.store(out + n, second.to(grad_scores_ptr.dtype.element_ty), mask=wanted)
