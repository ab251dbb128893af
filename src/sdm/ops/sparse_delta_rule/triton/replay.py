"""The first half of backward: the writes again, up to the rows that a token leaves, and which old rows are kept.

Backward recovers the row before a write from the row after it, (row - push) / factor, unless too much rounding would
come of it: the README of this op derives the allowance that decides it. Here a row counts by what it holds in the S
channels of its program, and each program decides for its own channels, from the rows themselves, before it overwrites
them.

Kept rows go to a ring. Where a sequence needs more of it than there is, the ring holds the newest; backward comes to a
token whose rows are gone, and has the writes run again up to there. So memory has a bound that nobody has to know the
gates for, and nothing ever waits for the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdm.ops.sparse_delta_rule.triton.rows import INVERTED, ZERO, keep_rows, load_rows, store_rows
from sdm.ops.sparse_delta_rule.triton.sequences import at_cell, below


@triton.jit
def ring_of(sequence, start, end, W, SHARE: tl.constexpr, WP: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row and number of rows of a sequence's ring: one for SHARE writes, and a token's more."""
    return start * W // SHARE + sequence.to(tl.int64) * WP, (end - start) * W // SHARE + WP


@triton.jit
def ring_position(capacity, count, place):  # type: ignore[no-untyped-def]
    """Where in its ring the row is that is kept as number `place` [X] of a token, after `count` rows.

    A token has fewer rows than the ring. Counts are of 32 bits where those hold every offset within a ring.
    """
    size = capacity.to(count.dtype)
    at = count % size + place
    return tl.where(at >= size, at - size, at)


@triton.jit
def reset(table, initial, allowance, channel, lane, N, D, BLOCK: tl.constexpr, INITIAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """All rows as they were, for a sequence that is run again."""
    for block in range(0, N, BLOCK):
        row = (block + tl.arange(0, BLOCK)).to(tl.int64)
        there = (row < N)[:, None] & lane[None, :]
        at = row[:, None] * D + channel[None, :]
        rows = tl.zeros((BLOCK, lane.shape[0]), table.dtype.element_ty)
        if INITIAL:
            rows = tl.load(initial + at, mask=there, other=0).to(table.dtype.element_ty)
        tl.store(table + at, rows, mask=there)
        tl.store(allowance + row, float("inf"), mask=row < N)


@triton.jit
def replay(  # type: ignore[no-untyped-def]
    start, stop, head, channel, lane, capacity,
    write_weight, beta, write_slot, factor, residual,
    table, allowance, saved, scales, places, counts,
    H, D, W, limit,
    WP: tl.constexpr, S: tl.constexpr, SMALLEST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Runs the writes of the tokens start ... stop - 1. Returns how many rows were to be kept."""
    ACC: tl.constexpr = residual.dtype.element_ty
    i = tl.arange(0, WP)
    there = below(i, W, WP)
    count = (start * 0).to(counts.dtype.element_ty)
    next_slot = tl.load(at_cell(write_slot, start, head, H, W) + i, mask=there, other=-1)
    next_weight = tl.load(at_cell(write_weight, start, head, H, W) + i, mask=there, other=0)
    next_factor = tl.load(at_cell(factor, start, head, H, W) + i, mask=there, other=1)
    for token in range(start, stop):
        slot, weight, own = next_slot, next_weight.to(ACC), next_factor
        rows = load_rows(table, slot, there, channel, lane, D)
        left = tl.load(allowance + slot, mask=there, other=0)
        error = tl.load(at_cell(residual, token, head, H, D) + channel, mask=lane, other=0)
        strength = tl.load(at_cell(beta, token, head, H, 1)).to(ACC)
        # What the next token writes is known when its rows are asked for.
        wanted = there & (token + 1 < stop)
        next_slot = tl.load(at_cell(write_slot, token + 1, head, H, W) + i, mask=wanted, other=-1)
        next_weight = tl.load(at_cell(write_weight, token + 1, head, H, W) + i, mask=wanted, other=0)
        next_factor = tl.load(at_cell(factor, token + 1, head, H, W) + i, mask=wanted, other=1)

        # Comparisons with NaN are false: what is not a number is kept.
        push = weight * strength
        size = tl.sum(tl.abs(rows), 1)
        pushed = tl.abs(push) * tl.sum(tl.abs(error))
        shrunk = tl.abs(own)
        left = shrunk * tl.where(limit * size < left, limit * size, left) - (shrunk * size + pushed + SMALLEST)
        inverted = there & (left > 0) & (shrunk >= SMALLEST)
        if KIND != "planned":
            inverted = there & (size < 0)
        # A row of zeros needs no copy.
        copied = there & (inverted == 0) & (size != 0)
        place = tl.cumsum(copied.to(tl.int32), 0)
        how = tl.where(inverted, INVERTED, tl.where(copied, place, ZERO))
        tl.store(at_cell(places, token, head, H, W) + i, how.to(places.dtype.element_ty), mask=there)
        tl.store(at_cell(counts, token, head, H, 1), count)
        keep_rows(rows, ring_position(capacity, count, place - 1), copied, lane, saved, scales, S, KIND)
        count += tl.sum(copied.to(tl.int32))
        # Everybody has read the rows and allowances that are overwritten.
        tl.debug_barrier()
        tl.store(allowance + slot, tl.where(inverted, left, float("inf")), mask=there)
        store_rows(table, slot, own[:, None] * rows + push[:, None] * error[None, :], there, channel, lane, D)
        tl.debug_barrier()
    return count
