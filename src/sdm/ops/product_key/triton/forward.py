"""The two kernels that select slots: one sorts halves, the other sums that can win.

n scores per half, k selected slots; a program takes a few rows. Sizes of tiles are powers of two, given by their
logarithms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdm.ops.product_key.triton.sorting import best

LARGEST = tl.constexpr(1.7014117331926443e38)  # half of the largest float32, as in order.py
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
    # The exact sum, as in order.py: rounded + error.
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
