"""The memory through time: a program owns S channels of one sequence and head, and walks its chunks in one launch.

At a chunk it gathers the rows that the chunk writes, as they are at its start, and keeps them in registers: a row is
read once and written once. Three small sums follow from what `prepare.py` left,

    x = v - sum_i k_i keep_i row_i        e = solve x        y = sum_j q_j keep_j row_j + mix e

and each distinct slot is replaced by keep row + its pushes. Sums skip coefficients of zero, which are tokens that
share no slot, so that a NaN reaches those tokens only that the recurrence lets it reach. C is 8 where W is 64:
products so small need no tensor cores, and are exact to float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdm.ops.sparse_delta_rule.triton.sequences import at_cell, below, sequence_bounds


@triton.jit
def combine(coefficient, x):  # type: ignore[no-untyped-def]
    """coefficient [C,C] times x [C,S], without what is multiplied by zero."""
    used = coefficient != 0
    return tl.sum(tl.where(used[:, :, None], coefficient[:, :, None] * x[None, :, :], 0), 1)


@triton.jit
def gather(table, code, there, channel, lane, D):  # type: ignore[no-untyped-def]
    """[C,X,S]: the rows of the slots [C,X], which are marked by their sign."""
    slot = tl.where(code < 0, -1 - code, code).to(tl.int64)
    address = table + slot[:, :, None] * D + channel[None, None, :]
    return tl.load(address, mask=there[:, :, None] & lane[None, None, :], other=0)


@triton.jit
def vectors(pointer, token, stride, channel, wanted, lane):  # type: ignore[no-untyped-def]
    """[C,X,S]: the vectors of the tokens [C,X] that are wanted, zeros elsewhere."""
    at = (token * stride)[:, :, None] + channel[None, None, :]
    return tl.load(pointer + at, mask=wanted[:, :, None] & lane[None, None, :], other=0)


@triton.jit
def add_older_pushes(  # type: ignore[no-untyped-def]
    content, product, number, steps, channel, lane, write_weight, beta, factor, prev, residual,
    H, W, D, WP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Walk along the writes of a slot within a chunk, newest first.

    Write i of token t has the number t*WP + i. Pointers are to the chunk's first token, so that offsets within it fit
    into 32 bits. Returns content [C,X,S] plus the pushes of the writes that `number` [C,X] names and of those before
    them, each times the factors since and `product`; and the product of all these factors.
    """
    for _ in range(steps):
        hit = number >= 0
        token = number // WP * H
        at = token * W + number % WP
        push = tl.load(write_weight + at, mask=hit, other=0).to(ACC) * tl.load(beta + token, mask=hit, other=0).to(ACC)
        content += (product * push)[:, :, None] * vectors(residual, token, D, channel, hit, lane)
        product *= tl.load(factor + at, mask=hit, other=1)
        number = tl.load(prev + at, mask=hit, other=-1).to(tl.int32)
    return content, product


@triton.jit(do_not_specialize=["time", "begin"])
def forward_kernel(  # type: ignore[no-untyped-def]
    write_weight, value, beta, read_weight, cu_seqlens,
    write_slot, prev, factor, keep, solve, read_slot, read_keep, mix, depth,
    table, residual, y,
    time, begin, N,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, WP: tl.constexpr, RP: tl.constexpr, S: tl.constexpr,
    PACKED: tl.constexpr, SLOT_RULE: tl.constexpr,
):  # fmt: skip
    """Run one stream and one slab of value channels through time, a chunk of C tokens at a time."""
    ACC: tl.constexpr = residual.dtype.element_ty
    slabs = tl.cdiv(D, S)
    place = tl.program_id(0) // slabs
    stream = begin + place
    head = stream % H
    start, end = sequence_bounds(cu_seqlens, stream // H, time, PACKED)
    channel = tl.program_id(0) % slabs * S + tl.arange(0, S)
    lane = below(channel, D, S)
    table += place.to(tl.int64) * N * D
    t = tl.arange(0, C)
    s = tl.arange(0, C)[None, :]
    i = tl.arange(0, WP)[None, :]
    j = tl.arange(0, RP)[None, :]
    at = (t * H * W)[:, None] + i
    at_r = (t * H * R)[:, None] + j
    at_matrix = (t * H * C)[:, None] + s
    at_channel = (t * H * D)[:, None] + channel[None, :]
    for first in range(start, end, C):
        weights = at_cell(write_weight, first, head, H, W)
        factors = at_cell(factor, first, head, H, W)
        links = at_cell(prev, first, head, H, W)
        strengths = at_cell(beta, first, head, H, 1)
        errors = at_cell(residual, first, head, H, D)
        live = first + t < end
        there = live[:, None] & below(i, W, WP)
        there_r = live[:, None] & below(j, R, RP)
        there_channel = live[:, None] & lane[None, :]
        code = tl.load(at_cell(write_slot, first, head, H, W) + at, mask=there, other=-1)
        weight = tl.load(weights + at, mask=there, other=0).to(ACC)
        kept = tl.load(at_cell(keep, first, head, H, W) + at, mask=there, other=0)
        strength = tl.load(strengths + t * H, mask=live, other=0).to(ACC)
        mixed = tl.load(at_cell(mix, first, head, H, C) + at_matrix, mask=live[:, None], other=0)
        error = tl.load(at_cell(value, first, head, H, D) + at_channel, mask=there_channel, other=0).to(ACC)
        steps = tl.load(depth + first * H + head)
        rows = gather(table, code, there, channel, lane, D).to(ACC)

        # Reads come first, so that they wait for memory together with the rows that are written.
        code_r = tl.load(at_cell(read_slot, first, head, H, R) + at_r, mask=there_r, other=-1)
        share = tl.load(at_cell(read_weight, first, head, H, R) + at_r, mask=there_r, other=0).to(ACC)
        share *= tl.load(at_cell(read_keep, first, head, H, R) + at_r, mask=there_r, other=0)
        output = tl.sum(share[:, :, None] * gather(table, code_r, there_r, channel, lane, D).to(ACC), 1)
        if not SLOT_RULE:
            error -= tl.sum((weight * kept)[:, :, None] * rows, 1)
            error = combine(tl.load(at_cell(solve, first, head, H, C) + at_matrix, mask=live[:, None], other=0), error)
        tl.store(errors + at_channel, error, mask=there_channel)
        output += combine(mixed, error)
        tl.store(at_cell(y, first, head, H, D) + at_channel, output, mask=there_channel)

        rows = kept[:, :, None] * rows + (weight * strength[:, None])[:, :, None] * error[:, None, :]
        # Everybody has read the rows of the chunk's start, and can read the errors of the others.
        tl.debug_barrier()
        if steps > 0:
            number = tl.where(code >= 0, tl.load(links + at, mask=there, other=-1).to(tl.int32), -1)
            own = tl.load(factors + at, mask=there & (number >= 0), other=0)
            rows, own = add_older_pushes(
                rows, own, number, steps, channel, lane, weights, strengths, factors, links, errors, H, W, D, WP, ACC
            )
        tl.store(
            table + code.to(tl.int64)[:, :, None] * D + channel[None, None, :],
            rows.to(table.dtype.element_ty),
            mask=(code >= 0)[:, :, None] & lane[None, None, :],
        )
        tl.debug_barrier()
