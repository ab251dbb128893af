"""Backward through time: a program owns S channels of one sequence and head, and walks its chunks in reverse.

The memory table holds the rows after the chunk, a second table G the gradient of the loss with respect to them. With
dy the gradient of the output, e the residual, and M, Gamma the memory and its gradient around each single write:

    de     = sum_i k_i beta after_i G_i + mix^T dy          dv = solve^T de
    Gamma  = G, and what later reads and writes of the chunk ask of the slot
    M      = the rows of the chunk's start, by inversion or from the ring, and what earlier writes of it left
    dk_i   = beta <Gamma_i, e> - f_i <dv, M_i>              dbeta = sum_i k_i <Gamma_i, e>
    dg_i   = f_i <Gamma_i - k_i dv, M_i>                    dq_j  = <dy, M_j>
    G      = f_i (Gamma_i - k_i dv) at a slot's first write, and q_j dy for each read before it

Sums over channels are sums over programs: each leaves its part, and `reduce.py` adds them up in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdm.ops.sparse_delta_rule.triton.chains import add_later_accesses, add_older_pushes, add_reads_before_writes
from sdm.ops.sparse_delta_rule.triton.forward import combine, gather
from sdm.ops.sparse_delta_rule.triton.replay import (
    INVERTED,
    load_slots,
    replay,
    reset,
    ring_of,
    ring_position,
    rows_to_recover,
)
from sdm.ops.sparse_delta_rule.triton.sequences import at_cell, below, sequence_bounds


@triton.jit(do_not_specialize=["time", "begin", "low", "high", "span"])
def backward_kernel(  # type: ignore[no-untyped-def]
    write_weight, beta, log_decay, read_weight, cu_seqlens,
    write_slot, prev, next_of_write, factor, keep, after, solve,
    read_slot, seen, next_of_read, mix, depth, length,
    residual, initial, table, allowance, saved, scales, places, counts, lowest,
    grad_y, grad_table, grad_value, partial,
    time, begin, low, high, span, rings, limit, N, streams, initial_stride,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, WP: tl.constexpr, RP: tl.constexpr, S: tl.constexpr,
    SHARE: tl.constexpr, SMALLEST: tl.constexpr, KIND: tl.constexpr,
    PACKED: tl.constexpr, PER_WRITE: tl.constexpr, SLOT_RULE: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Chunks that begin at positions low ... high - 1 of their row; launches go from the last window to the first."""
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
    chunks = tl.cdiv(end - start, C)
    upto = tl.minimum(tl.maximum(tl.cdiv(high - (start - origin), C), 0), chunks)
    down_to = tl.minimum(tl.maximum(tl.cdiv(low - (start - origin), C), 0), chunks)

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
    ring, capacity = ring_of(sequence, start, end, W, SHARE, C, WP)
    ring = slab.to(tl.int64) * rings * H + ring * H + head * capacity
    saved += ring * (S // 2 if KIND == "int4" else S)
    if KIND == "fp8" or KIND == "int4":
        scales += ring
    width = W + R + 2
    if PER_WRITE:
        width = W + R + W + 1
    partial += (slab.to(tl.int64) * (1 if PACKED else streams // H) * span + row * span - origin - low) * H * width

    t = tl.arange(0, C)
    i = tl.arange(0, WP)[None, :]
    j = tl.arange(0, RP)[None, :]
    at = (t * H * W)[:, None] + i
    at_r = (t * H * R)[:, None] + j
    at_channel = (t * H * D)[:, None] + channel[None, :]
    transposed = (t * H * C)[None, :] + t[:, None]
    bottom = start + down_to * C
    top = start + (upto - 1) * C
    oldest = tl.load(lowest)
    next_code = load_slots(write_slot, top, upto > down_to, end, head, at, t, i, H, W, WP)
    next_code_r = load_slots(read_slot, top, upto > down_to, end, head, at_r, t, j, H, R, RP)
    next_count = tl.load(counts + top * H + head, mask=upto > down_to, other=0)
    next_how = tl.load(at_cell(places, top, head, H, W) + at, mask=next_code >= 0, other=0)
    for reverse in range(upto - down_to):
        first = top - reverse * C
        newest = upto - reverse == chunks
        code, code_r, how, count = next_code, next_code_r, next_how, next_count
        last = code >= 0
        if newest | (count < oldest):
            if not newest:
                reset(table, initial, allowance, channel, lane, N, D, C * WP, INITIAL)
                tl.debug_barrier()
            oldest = replay(
                first + 1, start, end, head, channel, lane, capacity,
                write_weight, beta, write_slot, prev, factor, keep, depth, residual,
                table, allowance, saved, scales, places, counts,
                H, D, W, limit, C, WP, S, SMALLEST, KIND,
            ) - capacity.to(count.dtype)  # fmt: skip
            tl.store(lowest, oldest)
            tl.debug_barrier()
            count = tl.load(counts + first * H + head)
            how = tl.load(at_cell(places, first, head, H, W) + at, mask=last, other=0)

        weights = at_cell(write_weight, first, head, H, W)
        factors = at_cell(factor, first, head, H, W)
        links = at_cell(prev, first, head, H, W)
        nexts = at_cell(next_of_write, first, head, H, W)
        strengths = at_cell(beta, first, head, H, 1)
        errors = at_cell(residual, first, head, H, D)
        weights_r = at_cell(read_weight, first, head, H, R)
        nexts_r = at_cell(next_of_read, first, head, H, R)
        grads_y = at_cell(grad_y, first, head, H, D)
        grads_value = at_cell(grad_value, first, head, H, D)
        parts = at_cell(partial, first, head, H, width)

        # All rows of the chunk are asked for at once, and the slots of the chunk before it.
        live = first + t < end
        there = live[:, None] & below(i, W, WP)
        there_r = live[:, None] & below(j, R, RP)
        there_channel = live[:, None] & lane[None, :]
        begins = code_r >= 0
        inverted = last & (how == INVERTED)
        gradient = gather(grad_table, code, there, channel, lane, D)
        rows = rows_to_recover(
            code, how, ring_position(capacity, count, how.to(count.dtype) - 1),
            channel, lane, table, saved, scales, D, S, KIND, ACC,
        )  # fmt: skip
        weight_r = tl.load(weights_r + at_r, mask=there_r, other=0).to(ACC)
        if C == 1:
            # A token reads what it leaves, and of the gradients those of slots that it does not write.
            rows_r = gather(table, code_r, there_r, channel, lane, D)
            gradient_r = gather(grad_table, code_r, begins, channel, lane, D)
        before = first - C
        next_code = load_slots(write_slot, before, before >= bottom, end, head, at, t, i, H, W, WP)
        next_code_r = load_slots(read_slot, before, before >= bottom, end, head, at_r, t, j, H, R, RP)
        next_count = tl.load(counts + before * H + head, mask=before >= bottom, other=0)
        next_how = tl.load(
            at_cell(places, before, head, H, W) + at, mask=(before >= bottom) & below(i, W, WP), other=0
        )

        earlier = tl.load(depth + first * H + head)
        later = tl.load(length + first * H + head)
        weight = tl.load(weights + at, mask=there, other=0).to(ACC)
        own = tl.load(factors + at, mask=there, other=1)
        strength = tl.load(strengths + t * H, mask=live, other=0).to(ACC)
        error = tl.load(errors + at_channel, mask=there_channel, other=0)
        asked = tl.load(grads_y + at_channel, mask=there_channel, other=0).to(ACC)
        push = weight * strength[:, None]
        part = t * H * width
        if C == 1:
            tl.store(parts + part[:, None] + W + j, tl.sum(rows_r * asked[:, None, :], 2), mask=there_r)
            gradient_r += weight_r[:, :, None] * asked[:, None, :]
            address_r = grad_table + code_r.to(tl.int64)[:, :, None] * D + channel[None, None, :]
            tl.store(address_r, gradient_r, mask=begins[:, :, None] & lane[None, None, :])

        # The gradient of the residual and of the value.
        gradient *= tl.load(at_cell(after, first, head, H, W) + at, mask=there, other=0)[:, :, None]
        grad_error = tl.sum(push[:, :, None] * gradient, 1)
        mixed = tl.load(at_cell(mix, first, head, H, C) + transposed, mask=live[None, :], other=0)
        grad_error += combine(mixed, asked)
        if not SLOT_RULE:
            solved = tl.load(at_cell(solve, first, head, H, C) + transposed, mask=live[None, :], other=0)
            grad_error = combine(solved, grad_error)
        tl.store(grads_value + at_channel, grad_error, mask=there_channel)
        # Everybody has gathered the rows that are overwritten below, and can read the gradients of the values.
        tl.debug_barrier()

        # The gradient of each row after its write, and before it.
        if later > 0:
            following = tl.load(nexts + at, mask=there, other=-1).to(tl.int32)
            gradient = add_later_accesses(
                gradient, following, later, channel, lane,
                weights, factors, nexts, weights_r, nexts_r, grads_value, grads_y,
                H, D, W, R, C, WP, RP, SLOT_RULE, ACC,
            )  # fmt: skip
        by_push = tl.sum(gradient * error[:, None, :], 2)
        if not SLOT_RULE:
            gradient -= weight[:, :, None] * grad_error[:, None, :]
        opens = there
        if C > 1:
            opens = there & (tl.load(links + at, mask=there, other=-1) < 0)
        slot = tl.where(last, code, -1 - code).to(tl.int64)
        address = grad_table + slot[:, :, None] * D + channel[None, None, :]
        tl.store(address, own[:, :, None] * gradient, mask=opens[:, :, None] & lane[None, None, :])

        # Each row before its write. `content` is first what earlier writes of the chunk pushed, then all.
        content = tl.zeros((C, WP, S), ACC)
        left = tl.full((C, WP), 1, ACC)
        if C > 1:
            if earlier > 0:
                number = tl.load(links + at, mask=there, other=-1).to(tl.int32)
                content, left = add_older_pushes(
                    content, left, number, earlier, channel, lane, weights, strengths, factors, links, errors,
                    H, W, D, WP, ACC,
                )  # fmt: skip
        pushed = own[:, :, None] * content + push[:, :, None] * error[:, None, :]
        kept = tl.load(at_cell(keep, first, head, H, W) + at, mask=inverted, other=1)
        rows = tl.where(inverted[:, :, None], (rows - pushed) * (1 / kept)[:, :, None], rows)
        address = table + code.to(tl.int64)[:, :, None] * D + channel[None, None, :]
        tl.store(address, rows, mask=last[:, :, None] & lane[None, None, :])
        if C > 1:
            # Everybody can read the rows of the chunk's start, and the gradients before its writes.
            tl.debug_barrier()
            rows_r = gather(table, code_r, there_r, channel, lane, D)
            gradient_r = gather(grad_table, code_r, begins, channel, lane, D)
            rows = tl.where(last[:, :, None], rows, gather(table, code, there & (last == 0), channel, lane, D))
        content += left[:, :, None] * rows

        # The gradients of weights and gates.
        grad_weight = by_push
        by_factor = tl.sum(gradient * content, 2)
        if SLOT_RULE:
            if PER_WRITE:
                decay = tl.exp(tl.load(at_cell(log_decay, first, head, H, W) + at, mask=there, other=0).to(ACC))
            else:
                decay = tl.exp(tl.load(at_cell(log_decay, first, head, H, 1) + t * H, mask=live, other=0).to(ACC))
                decay = decay[:, None]
            by_push -= decay * by_factor
            grad_weight = strength[:, None] * by_push
        else:
            grad_weight = strength[:, None] * by_push - own * tl.sum(grad_error[:, None, :] * content, 2)
        tl.store(parts + part[:, None] + i, grad_weight, mask=there)
        by_factor = tl.where(there, own * by_factor, 0)
        if PER_WRITE:
            tl.store(parts + part[:, None] + W + R + i, by_factor, mask=there)
        else:
            tl.store(parts + part + W + R, tl.sum(by_factor, 1), mask=live)
        tl.store(parts + part + width - 1, tl.sum(tl.where(there, weight * by_push, 0), 1), mask=live)

        if C > 1:
            gradient_r += weight_r[:, :, None] * asked[:, None, :]
            if later > 0:
                following_r = tl.load(nexts_r + at_r, mask=begins, other=-1).to(tl.int32)
                gradient_r = add_reads_before_writes(
                    gradient_r, following_r, later, channel, lane, weights_r, nexts_r, grads_y,
                    H, D, R, C, WP, RP, ACC,
                )  # fmt: skip
            address_r = grad_table + code_r.to(tl.int64)[:, :, None] * D + channel[None, None, :]
            tl.store(address_r, gradient_r, mask=begins[:, :, None] & lane[None, None, :])
            if earlier > 0:
                content_r = tl.zeros((C, RP, S), ACC)
                left_r = tl.full((C, RP), 1, ACC)
                seen_write = tl.load(at_cell(seen, first, head, H, R) + at_r, mask=there_r, other=-1).to(tl.int32)
                content_r, left_r = add_older_pushes(
                    content_r, left_r, seen_write, earlier, channel, lane, weights, strengths, factors, links, errors,
                    H, W, D, WP, ACC,
                )  # fmt: skip
                rows_r = content_r + left_r[:, :, None] * rows_r
            tl.store(parts + part[:, None] + W + j, tl.sum(rows_r * asked[:, None, :], 2), mask=there_r)
        tl.debug_barrier()
