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

from sdm.ops.sparse_delta_rule.triton.chains import vectors
from sdm.ops.sparse_delta_rule.triton.forward import gather
from sdm.ops.sparse_delta_rule.triton.rows import keep_rows, kept_rows
from sdm.ops.sparse_delta_rule.triton.sequences import at_cell, below

# How the row before a write is recovered: 0 by inversion, -1 it is zero, n > 0 it is the n-th kept row of its chunk.
INVERTED = tl.constexpr(0)
ZERO = tl.constexpr(-1)


@triton.jit
def ring_of(sequence, start, end, W, SHARE: tl.constexpr, C: tl.constexpr, WP: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row and number of rows of a sequence's ring: one for SHARE writes, and a chunk more."""
    return start * W // SHARE + sequence.to(tl.int64) * (C * WP), (end - start) * W // SHARE + C * WP


@triton.jit
def ring_position(capacity, count, place):  # type: ignore[no-untyped-def]
    """Where in its ring the row is that is kept as number `place` [C,X] of a chunk, after `count` rows.

    A chunk has fewer rows than the ring. Counts are of 32 bits where those hold every offset within a ring.
    """
    size = capacity.to(count.dtype)
    at = count % size + place
    return tl.where(at >= size, at - size, at)


@triton.jit
def load_slots(slots, first, wanted, end, head, at, t, x, H, X: tl.constexpr, XP: tl.constexpr):  # type: ignore[no-untyped-def]
    """[C,XP]: the slots of the chunk that begins at `first`; -1 where there are none, or the chunk is not wanted."""
    there = (first + t < end) & wanted
    return tl.load(at_cell(slots, first, head, H, X) + at, mask=there[:, None] & below(x, X, XP), other=-1)


@triton.jit
def rows_to_recover(  # type: ignore[no-untyped-def]
    code, how, position, channel, lane, table, saved, scales, D, S: tl.constexpr, KIND: tl.constexpr, ACC: tl.constexpr
):
    """[C,X,S]: rows after the chunk that are inverted, rows of its start that were kept, and zeros."""
    copied = (code >= 0) & (how > 0)
    if KIND == "planned":
        of_table = table + code.to(tl.int64)[:, :, None] * D + channel[None, None, :]
        of_ring = saved + position[:, :, None] * S + tl.arange(0, S)[None, None, :]
        wanted = (code >= 0) & (how != ZERO)
        address = tl.where(copied[:, :, None], of_ring, of_table)
        rows = tl.load(address, mask=wanted[:, :, None] & lane[None, None, :], other=0)
    else:
        rows = kept_rows(position, copied, lane, saved, scales, S, KIND, ACC)
    return rows


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
    stop, start, end, head, channel, lane, capacity,
    write_weight, beta, write_slot, prev, factor, keep, depth, residual,
    table, allowance, saved, scales, places, counts,
    H, D, W, limit,
    C: tl.constexpr, WP: tl.constexpr, S: tl.constexpr, SMALLEST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Runs the writes up to token `stop`. Returns how many rows were to be kept."""
    ACC: tl.constexpr = residual.dtype.element_ty
    t = tl.arange(0, C)
    i = tl.arange(0, WP)[None, :]
    at = (t * H * W)[:, None] + i
    count = (start * 0).to(counts.dtype.element_ty)
    following = load_slots(write_slot, start, start < stop, end, head, at, t, i, H, W, WP)
    for first in range(start, stop, C):
        weights = at_cell(write_weight, first, head, H, W)
        factors = at_cell(factor, first, head, H, W)
        links = at_cell(prev, first, head, H, W)
        strengths = at_cell(beta, first, head, H, 1)
        errors = at_cell(residual, first, head, H, D)
        live = first + t < end
        code = following
        last = code >= 0
        rows = gather(table, code, last, channel, lane, D)
        left = tl.load(allowance + code, mask=last, other=0)
        # The slots of the next chunk are known when its rows are asked for.
        following = load_slots(write_slot, first + C, first + C < stop, end, head, at, t, i, H, W, WP)
        kept = tl.load(at_cell(keep, first, head, H, W) + at, mask=last, other=1)
        push = tl.load(weights + at, mask=last, other=0).to(ACC)
        push *= tl.load(strengths + t * H, mask=live, other=0).to(ACC)[:, None]
        error = tl.load(errors + (t * H * D)[:, None] + channel[None, :], mask=live[:, None] & lane[None, :], other=0)
        size = tl.sum(tl.abs(rows), 2)
        pushed = tl.abs(push) * tl.sum(tl.abs(error), 1)[:, None]
        after = kept[:, :, None] * rows + push[:, :, None] * error[:, None, :]
        if C > 1:
            steps = tl.load(depth + first * H + head)
            number = tl.where(last, tl.load(links + at, mask=last, other=-1).to(tl.int32), -1)
            product = tl.load(factors + at, mask=number >= 0, other=0)
            for _ in range(steps):
                hit = number >= 0
                token = number // WP * H
                at_p = token * W + number % WP
                older = product * tl.load(weights + at_p, mask=hit, other=0).to(ACC)
                older *= tl.load(strengths + token, mask=hit, other=0).to(ACC)
                errors_p = vectors(errors, token, D, channel, hit, lane)
                after += older[:, :, None] * errors_p
                pushed += tl.abs(older) * tl.sum(tl.abs(errors_p), 2)
                product *= tl.load(factors + at_p, mask=hit, other=1)
                number = tl.load(links + at_p, mask=hit, other=-1).to(tl.int32)

        # Comparisons with NaN are false: what is not a number is kept.
        shrunk = tl.abs(kept)
        left = shrunk * tl.where(limit * size < left, limit * size, left) - (shrunk * size + pushed + SMALLEST)
        inverted = (left > 0) & (shrunk >= SMALLEST)
        if KIND != "planned":
            inverted = last & (size < 0)
        # A row of zeros needs no copy.
        copied = last & (inverted == 0) & (size != 0)
        place = tl.reshape(tl.cumsum(tl.reshape(copied.to(tl.int32), (C * WP,)), 0), (C, WP))
        how = tl.where(inverted, INVERTED, tl.where(copied, place, ZERO))
        tl.store(at_cell(places, first, head, H, W) + at, how.to(tl.int16), mask=last)
        tl.store(counts + first * H + head, count)
        keep_rows(rows, ring_position(capacity, count, place - 1), copied, lane, saved, scales, S, KIND)
        count += tl.sum(copied.to(tl.int32))
        # Everybody has read the rows and allowances that are overwritten.
        tl.debug_barrier()
        tl.store(allowance + code, tl.where(inverted, left, float("inf")), mask=last)
        address = table + code.to(tl.int64)[:, :, None] * D + channel[None, None, :]
        tl.store(address, after, mask=last[:, :, None] & lane[None, None, :])
        tl.debug_barrier()
    return count
