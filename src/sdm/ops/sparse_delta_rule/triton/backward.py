"""Backward through time: a program owns S channels of one sequence and head, and walks its tokens in reverse.

The memory table holds the rows after the token, a second table G the gradient of the loss with respect to them. With
dy the gradient of the output, e the residual, and q_i the weight with which the token reads slot i itself, or 0:

    de     = sum_i k_i beta G_i + dy sum_i q_i k_i beta      dv = de
    Gamma  = G_i + q_i dy                                    the gradient of the row after its write
    M_i    = the row before its write, by inversion or from the ring
    dk_i   = beta <Gamma_i, e> - f_i <dv, M_i>               dbeta = sum_i k_i <Gamma_i, e>
    dg_i   = f_i <Gamma_i - k_i dv, M_i>                     dq_j  = <dy, row j of the table>
    G_i    = f_i (Gamma_i - k_i dv) at the slots that are written, G_j + q_j dy at those that are only read

A token's rows are asked for at once, and its slots while the token after it is worked on: what is left to wait for is
memory. Chunks of several tokens would share that wait, but walks along the slots that their tokens share cost more than
they save (docs/performance.md). Sums over channels are sums over programs: each leaves its part, and `reduce.py` adds
them up in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdm.ops.sparse_delta_rule.triton.replay import replay, reset, ring_of, ring_position
from sdm.ops.sparse_delta_rule.triton.rows import INVERTED, kept_rows, load_rows, store_rows
from sdm.ops.sparse_delta_rule.triton.sequences import at_cell, below, sequence_bounds


@triton.jit(do_not_specialize=["time", "begin", "low", "high", "span"])
def backward_kernel(  # type: ignore[no-untyped-def]
    write_weight, beta, log_decay, read_weight, cu_seqlens,
    write_slot, next_of_write, factor, read_slot, mix, length,
    residual, initial, table, allowance, saved, scales, places, counts, lowest,
    grad_y, grad_table, grad_value, partial,
    time, begin, low, high, span, rings, limit, N, streams, initial_stride,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    WP: tl.constexpr, RP: tl.constexpr, S: tl.constexpr,
    SHARE: tl.constexpr, SMALLEST: tl.constexpr, KIND: tl.constexpr,
    PACKED: tl.constexpr, PER_WRITE: tl.constexpr, SLOT_RULE: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Tokens at positions low ... high - 1 of their row; launches go from the last window to the first."""
    ACC: tl.constexpr = residual.dtype.element_ty
    slabs = tl.cdiv(D, S)
    slab = tl.program_id(0) % slabs
    local = tl.program_id(0) // slabs
    stream = begin + local
    head = stream % H
    sequence = stream // H
    start, end = sequence_bounds(cu_seqlens, sequence, time, PACKED)
    row = sequence.to(tl.int64)
    origin = start
    if PACKED:
        row = row * 0
        origin = start * 0
    # The window's tokens of this sequence: bottom ... top - 1.
    top = tl.minimum(tl.maximum(origin + high, start), end)
    bottom = tl.minimum(tl.maximum(origin + low, start), end)

    channel = slab * S + tl.arange(0, S)
    lane = below(channel, D, S)
    program = slab.to(tl.int64) * streams + local
    tokens = tl.where(PACKED, time, time * (streams // H)).to(tl.int64)
    table += local.to(tl.int64) * N * D
    grad_table += local.to(tl.int64) * N * D
    if INITIAL:
        initial += sequence.to(tl.int64) * initial_stride + head.to(tl.int64) * N * D
    allowance += program * N
    lowest += program
    places += slab.to(tl.int64) * tokens * H * W
    counts += slab.to(tl.int64) * tokens * H
    ring, capacity = ring_of(sequence, start, end, W, SHARE, WP)
    ring = slab.to(tl.int64) * rings * H + ring * H + head * capacity
    saved += ring * (S // 2 if KIND == "int4" else S)
    if KIND == "fp8" or KIND == "int4":
        scales += ring
    width = W + R + 2
    if PER_WRITE:
        width = W + R + W + 1
    partial += (slab.to(tl.int64) * (1 if PACKED else streams // H) * span + row * span - origin - low) * H * width

    i = tl.arange(0, WP)
    j = tl.arange(0, RP)
    there = below(i, W, WP)
    there_r = below(j, R, RP)
    newest = top - 1
    some = bottom < top
    oldest = tl.load(lowest)
    next_slot = tl.load(at_cell(write_slot, newest, head, H, W) + i, mask=there & some, other=-1)
    next_slot_r = tl.load(at_cell(read_slot, newest, head, H, R) + j, mask=there_r & some, other=-1)
    next_how = tl.load(at_cell(places, newest, head, H, W) + i, mask=there & some, other=0)
    next_count = tl.load(at_cell(counts, newest, head, H, 1), mask=some, other=0)
    for reverse in range(top - bottom):
        token = newest - reverse
        slot, slot_r, how, count = next_slot, next_slot_r, next_how, next_count
        if (token == end - 1) | (count < oldest):
            # The rows are gone, or were never there.
            if token < end - 1:
                reset(table, initial, allowance, channel, lane, N, D, WP, INITIAL)
                tl.debug_barrier()
            oldest = replay(
                start, token + 1, head, channel, lane, capacity,
                write_weight, beta, write_slot, factor, residual,
                table, allowance, saved, scales, places, counts,
                H, D, W, limit, WP, S, SMALLEST, KIND,
            ) - capacity.to(count.dtype)  # fmt: skip
            tl.store(lowest, oldest)
            how = tl.load(at_cell(places, token, head, H, W) + i, mask=there, other=0)
            count = tl.load(at_cell(counts, token, head, H, 1))

        # All rows of the token are asked for at once.
        gradient = load_rows(grad_table, slot, there, channel, lane, D)
        position = ring_position(capacity, count, how.to(count.dtype) - 1)
        inverted = there & (how == INVERTED)
        rows = load_rows(table, slot, inverted, channel, lane, D)
        kept = kept_rows(position, there & (how > 0), lane, saved, scales, S, KIND, ACC)
        only_read = slot_r >= 0
        rows_r = load_rows(table, tl.where(only_read, slot_r, -1 - slot_r), there_r, channel, lane, D)
        gradient_r = load_rows(grad_table, slot_r, only_read, channel, lane, D)
        error = tl.load(at_cell(residual, token, head, H, D) + channel, mask=lane, other=0)
        asked = tl.load(at_cell(grad_y, token, head, H, D) + channel, mask=lane, other=0).to(ACC)

        # The slots of the token before it are known when their rows are asked for.
        before = token - 1
        some = bottom <= before
        next_slot = tl.load(at_cell(write_slot, before, head, H, W) + i, mask=there & some, other=-1)
        next_slot_r = tl.load(at_cell(read_slot, before, head, H, R) + j, mask=there_r & some, other=-1)
        next_how = tl.load(at_cell(places, before, head, H, W) + i, mask=there & some, other=0)
        next_count = tl.load(at_cell(counts, before, head, H, 1), mask=some, other=0)

        weight_r = tl.load(at_cell(read_weight, token, head, H, R) + j, mask=there_r, other=0).to(ACC)
        weight = tl.load(at_cell(write_weight, token, head, H, W) + i, mask=there, other=0).to(ACC)
        own = tl.load(at_cell(factor, token, head, H, W) + i, mask=there, other=1)
        strength = tl.load(at_cell(beta, token, head, H, 1)).to(ACC)
        mixed = tl.load(at_cell(mix, token, head, H, 1))
        accesses = tl.load(at_cell(length, token, head, H, 1))
        parts = at_cell(partial, token, head, H, width)

        # Reads: the table holds what the token has seen.
        tl.store(parts + W + j, tl.sum(rows_r * asked[None, :], 1), mask=there_r)
        store_rows(grad_table, slot_r, gradient_r + weight_r[:, None] * asked[None, :], only_read, channel, lane, D)

        # The gradient of the value. A zero is a token that reads nothing that it writes.
        grad_error = tl.sum((strength * weight)[:, None] * gradient, 0)
        grad_error += tl.where(mixed != 0, mixed * asked, 0)
        tl.store(at_cell(grad_value, token, head, H, D) + channel, grad_error, mask=lane)

        # The gradient of each row after its write, and before it.
        if accesses > 0:
            number = tl.load(at_cell(next_of_write, token, head, H, W) + i, mask=there, other=-1).to(tl.int32) - WP
            weight_i = tl.load(at_cell(read_weight, token, head, H, R) + number, mask=number >= 0, other=0).to(ACC)
            gradient += tl.where((number >= 0)[:, None], weight_i[:, None] * asked[None, :], 0)
        by_push = tl.sum(gradient * error[None, :], 1)
        if not SLOT_RULE:
            gradient -= weight[:, None] * grad_error[None, :]
        # Everybody has gathered the rows that are overwritten.
        tl.debug_barrier()
        store_rows(grad_table, slot, own[:, None] * gradient, there, channel, lane, D)

        # Each row before its write.
        rows = (rows - (strength * weight)[:, None] * error[None, :]) * (1 / own)[:, None]
        rows = tl.where(inverted[:, None], rows, kept)
        store_rows(table, slot, rows, there, channel, lane, D)

        # The gradients of weights and gates.
        by_factor = tl.sum(gradient * rows, 1)
        if SLOT_RULE:
            if PER_WRITE:
                decay = tl.exp(tl.load(at_cell(log_decay, token, head, H, W) + i, mask=there, other=0).to(ACC))
            else:
                decay = tl.exp(tl.load(at_cell(log_decay, token, head, H, 1)).to(ACC))
            by_push -= decay * by_factor
            grad_weight = strength * by_push
        else:
            grad_weight = strength * by_push - own * tl.sum(grad_error[None, :] * rows, 1)
        tl.store(parts + i, grad_weight, mask=there)
        by_factor = tl.where(there, own * by_factor, 0)
        if PER_WRITE:
            tl.store(parts + W + R + i, by_factor, mask=there)
        else:
            tl.store(parts + W + R, tl.sum(by_factor))
        tl.store(parts + width - 1, tl.sum(tl.where(there, weight * by_push, 0)))
        tl.debug_barrier()
