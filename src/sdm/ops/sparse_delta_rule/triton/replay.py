"""The first half of backward: the writes again, up to the rows that a chunk leaves, and which old rows are kept.

Backward recovers the rows of a chunk's start from those of its end, (row - pushes) / keep, unless too much rounding
would come of it: the README of this op derives the allowance that decides it. Here a write is what a chunk does to a
slot, a row counts by what it holds in the S channels of its program, and each program decides for its own channels,
from the rows themselves, before it overwrites them.

Kept rows go to a ring. Where a sequence needs more of it than there is, the ring holds the newest; backward comes to a
chunk whose rows are gone, and has the writes run again up to there. So memory has a bound that nobody has to know the
gates for, and nothing ever waits for the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdm.ops.sparse_delta_rule.triton.chains import add_older_pushes, vectors
from sdm.ops.sparse_delta_rule.triton.forward import gather
from sdm.ops.sparse_delta_rule.triton.rows import keep_rows
from sdm.ops.sparse_delta_rule.triton.sequences import at_cell, below


@triton.jit
def ring_of(sequence, start, end, W, SHARE: tl.constexpr, C: tl.constexpr, WP: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row and number of rows of a sequence's ring: one for SHARE writes, and a chunk more."""
    return start * W // SHARE + sequence.to(tl.int64) * (C * WP), (end - start) * W // SHARE + C * WP


@triton.jit
def ring_position(ring, capacity, count, place):  # type: ignore[no-untyped-def]
    """Where the row goes that is kept as number `place` [C,X] of a chunk, after `count` rows.

    A chunk has fewer rows than the ring, and 32 bits hold a ring.
    """
    at = (count % capacity).to(tl.int32) + place
    return ring + tl.where(at >= capacity.to(tl.int32), at - capacity.to(tl.int32), at)


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
    stop, start, end, head, channel, lane, ring, capacity,
    write_weight, beta, write_slot, prev, factor, keep, depth, residual,
    table, allowance, saved, scales, flags, counts,
    H, D, W, limit,
    C: tl.constexpr, WP: tl.constexpr, S: tl.constexpr, SMALLEST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Runs the writes up to token `stop`. Returns how many rows were to be kept."""
    ACC: tl.constexpr = residual.dtype.element_ty
    t = tl.arange(0, C)
    i = tl.arange(0, WP)[None, :]
    at = (t * H * W)[:, None] + i
    count = start * 0
    for first in range(start, stop, C):
        weights = at_cell(write_weight, first, head, H, W)
        factors = at_cell(factor, first, head, H, W)
        links = at_cell(prev, first, head, H, W)
        strengths = at_cell(beta, first, head, H, 1)
        errors = at_cell(residual, first, head, H, D)
        live = first + t < end
        code = tl.load(at_cell(write_slot, first, head, H, W) + at, mask=live[:, None] & below(i, W, WP), other=-1)
        last = code >= 0
        rows = gather(table, code, last, channel, lane, D)
        kept = tl.load(at_cell(keep, first, head, H, W) + at, mask=last, other=1)
        push = tl.load(weights + at, mask=last, other=0).to(ACC)
        push *= tl.load(strengths + t * H, mask=live, other=0).to(ACC)[:, None]
        error = tl.load(errors + (t * H * D)[:, None] + channel[None, :], mask=live[:, None] & lane[None, :], other=0)
        size = tl.sum(tl.abs(rows), 2)
        pushed = tl.abs(push) * tl.sum(tl.abs(error), 1)[:, None]
        steps = tl.load(depth + first * H + head)
        number = tl.where(last, tl.load(links + at, mask=last, other=-1).to(tl.int32), -1)
        product = tl.load(factors + at, mask=number >= 0, other=0)
        for _ in range(steps):
            hit = number >= 0
            token = number // WP * H
            at_p = token * W + number % WP
            push_p = tl.abs(product * tl.load(weights + at_p, mask=hit, other=0).to(ACC))
            push_p *= tl.abs(tl.load(strengths + token, mask=hit, other=0).to(ACC))
            pushed += push_p * tl.sum(tl.abs(vectors(errors, token, D, channel, hit, lane)), 2)
            product *= tl.load(factors + at_p, mask=hit, other=1)
            number = tl.load(links + at_p, mask=hit, other=-1).to(tl.int32)

        left = tl.load(allowance + code, mask=last, other=0)
        # Everybody has read the rows and allowances that are overwritten below.
        tl.debug_barrier()
        # Comparisons with NaN are false: what is not a number is kept.
        shrunk = tl.abs(kept)
        left = shrunk * tl.where(limit * size < left, limit * size, left) - (shrunk * size + pushed + SMALLEST)
        inverted = (left > 0) & (shrunk >= SMALLEST)
        if KIND != "planned":
            inverted = last & (size < 0)
        tl.store(allowance + code, tl.where(inverted, left, float("inf")), mask=last)
        # A row of zeros needs no copy.
        how = tl.where(inverted, 0, tl.where(size == 0, 2, 1))
        tl.store(at_cell(flags, first, head, H, W) + at, how.to(tl.int8), mask=last)
        copied = last & (how == 1)
        place = tl.reshape(tl.cumsum(tl.reshape(copied.to(tl.int32), (C * WP,)), 0), (C, WP)) - 1
        tl.store(counts + first * H + head, count)
        keep_rows(rows, ring_position(ring, capacity, count, place), copied, lane, saved, scales, S, KIND)
        count += tl.sum(copied.to(tl.int32))

        rows = kept[:, :, None] * rows + push[:, :, None] * error[:, None, :]
        if steps > 0:
            number = tl.where(last, tl.load(links + at, mask=last, other=-1).to(tl.int32), -1)
            own = tl.load(factors + at, mask=number >= 0, other=0)
            rows, product = add_older_pushes(
                rows, own, number, steps, channel, lane, weights, strengths, factors, links, errors, H, W, D, WP, ACC
            )
        address = table + code.to(tl.int64)[:, :, None] * D + channel[None, None, :]
        tl.store(address, rows, mask=last[:, :, None] & lane[None, None, :])
        tl.debug_barrier()
    return count
