"""What follows from indices, weights and gates alone: one program per chunk and head, nothing depends on D.

The W writes and R reads of C tokens are sorted once by (slot, time), writes before reads of the same token. In this
order the accesses of a slot stand side by side, so that links to the previous write and to the next access cost a look
at the neighbours, whatever the order of the indices within a token. Two pointers per pair of tokens, the paper's way,
would take C^2 / 2 merges of W + R steps, each waiting for the one before; a sort is as parallel as it is wide.

All else walks these links. Token s is visited by all lanes (token t, index i) of the chunk at once, newest first; a
lane whose link names a write of s takes part. So L(s, t), the product of the factors between two writes of a slot,
grows by one factor at a time from the later write backwards, without logarithms and without quotients.

An index outside of the table reads and writes slot 0, and turns to NaN what it touches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdm.ops.sparse_delta_rule.triton.sequences import below, chunk_bounds

NOBODY = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def _sort(key, x, J: tl.constexpr):  # type: ignore[no-untyped-def]
    """A bitonic sort: log^2 exchanges with partners that a gather brings, in a loop that stays a loop when compiled."""
    size = 2
    while size <= J:
        distance = size // 2
        while distance > 0:
            partner = tl.gather(key, x ^ distance, 0)
            lower = ((x & distance) == 0) == ((x & size) == 0)
            key = tl.where(lower == (key < partner), key, partner)
            distance //= 2
        size *= 2
    return key


@triton.jit
def _identity(key, C: tl.constexpr, WP: tl.constexpr, RP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of an access within its chunk: write i of token t is t*WP + i, the reads come after all writes."""
    of_token = (key & 0xFFFF).to(tl.int32)
    time = ((key >> 16) & 0xFFFF).to(tl.int32)
    return tl.where((time & 1) == 1, C * WP + (time >> 1) * RP + of_token, (time >> 1) * WP + of_token)


@triton.jit
def _take_write(pointer, hit, first, head, write_weight, beta, factor, prev, H, W, WP: tl.constexpr, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Push and factor of the writes that lanes point to, and the writes before them."""
    cell = (first + pointer // WP) * H + head
    at = cell * W + pointer % WP
    push = tl.load(write_weight + at, mask=hit, other=0).to(ACC) * tl.load(beta + cell, mask=hit, other=0).to(ACC)
    return push, tl.load(factor + at, mask=hit, other=1), tl.load(prev + at, mask=hit, other=-1).to(tl.int32)


@triton.jit(do_not_specialize=["documents", "time"])
def prepare_kernel(  # type: ignore[no-untyped-def]
    write_index, write_weight, beta, log_decay, read_index, read_weight, cu_seqlens,
    write_slot, prev, next_of_write, factor, keep, solve,
    read_slot, seen, read_keep, mix,
    depth, length, keys, ranks,
    documents, time, N,
    H: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, WP: tl.constexpr, RP: tl.constexpr, J: tl.constexpr,
    PACKED: tl.constexpr, PER_WRITE: tl.constexpr, SLOT_RULE: tl.constexpr,
):  # fmt: skip
    """Work out, for each chunk, which tokens share slots and how they scale and mix."""
    ACC: tl.constexpr = keep.dtype.element_ty
    program = tl.program_id(0)
    head = program % H
    first, end, _ = chunk_bounds(cu_seqlens, program // H, documents, time, C, PACKED)
    if first >= end:
        return
    keys += program.to(tl.int64) * J
    ranks += program.to(tl.int64) * 2 * J

    # Sort all accesses by slot and time.
    x = tl.arange(0, J)
    writes = x < C * WP
    y = x - C * WP
    t = tl.where(writes, x // WP, y // RP)
    i = tl.where(writes, x % WP, y % RP)
    there = (first + t < end) & (t < C) & (i < tl.where(writes, W, R))
    cell = (first + t) * H + head
    index = tl.load(write_index + cell * W + i, mask=there & writes, other=0).to(tl.int64)
    index += tl.load(read_index + cell * R + i, mask=there & (writes == 0), other=0).to(tl.int64)
    slot = tl.where((index >= 0) & (index < N), index, 0)
    key = (slot << 32) | (2 * t + tl.where(writes, 0, 1)).to(tl.int64) << 16 | i.to(tl.int64)
    key = _sort(tl.where(there, key, NOBODY), x, J)
    there = key != NOBODY
    slot = (key >> 32).to(tl.int32)
    writes = there & (((key >> 16) & 1) == 0)
    tl.store(keys + x, key)
    # The position of the n-th write, and that of the first access of the n-th slot.
    rank = tl.cumsum(writes.to(tl.int32), 0)
    tl.store(ranks + rank - 1, x, mask=writes)
    tl.debug_barrier()
    before = tl.load(keys + x - 1, mask=x > 0, other=NOBODY)
    begins = there & ((before >> 32).to(tl.int32) != slot)
    begins = begins | (there & (x == 0))
    segment = tl.cumsum(begins.to(tl.int32), 0)
    tl.store(ranks + J + segment - 1, x, mask=begins)
    tl.debug_barrier()

    # Link each access to its neighbours in the slot.
    following = tl.load(keys + x + 1, mask=x < J - 1, other=NOBODY)
    follows = there & (following != NOBODY) & ((following >> 32).to(tl.int32) == slot)
    next_link = tl.where(follows, _identity(following, C, WP, RP), -1)
    earlier = rank - writes.to(tl.int32)
    at = tl.load(ranks + earlier - 1, mask=there & (earlier > 0), other=0)
    older = tl.load(keys + at, mask=there & (earlier > 0), other=NOBODY)
    has_older = (older != NOBODY) & ((older >> 32).to(tl.int32) == slot)
    prev_link = tl.where(has_older, _identity(older, C, WP, RP), -1)
    at = tl.load(ranks + rank, mask=writes & (rank < tl.sum(writes.to(tl.int32), 0)), other=0)
    newer = tl.load(keys + at, mask=writes & (rank < tl.sum(writes.to(tl.int32), 0)), other=NOBODY)
    last = (newer == NOBODY) | ((newer >> 32).to(tl.int32) != slot)
    t = ((key >> 17) & 0x7FFF).to(tl.int32)
    i = (key & 0xFFFF).to(tl.int32)
    cell = (first + t) * H + head
    at = cell * W + i
    tl.store(write_slot + at, tl.where(last, slot, -1 - slot), mask=writes)
    tl.store(prev + at, prev_link, mask=writes)
    tl.store(next_of_write + at, next_link, mask=writes)
    at = cell * R + i
    reads = there & (writes == 0)
    tl.store(read_slot + at, tl.where(begins, slot, -1 - slot), mask=reads)
    tl.store(seen + at, prev_link, mask=reads)
    start = tl.load(ranks + J + segment - 1, mask=there, other=0)
    longest = tl.max(tl.where(there, x - start, 0), 0)
    tl.store(length + first * H + head, longest)

    # What a write leaves of its slot.
    t = tl.arange(0, C)
    i = tl.arange(0, WP)[None, :]
    live = first + t < end
    cell = (first + t) * H + head
    strength = tl.load(beta + cell, mask=live, other=0).to(ACC)
    there = live[:, None] & below(i, W, WP)
    at = cell[:, None] * W + i
    weight = tl.load(write_weight + at, mask=there, other=0).to(ACC)
    if PER_WRITE:
        left = tl.exp(tl.load(log_decay + at, mask=there, other=0).to(ACC))
    else:
        left = tl.broadcast_to(tl.exp(tl.load(log_decay + cell, mask=live, other=0).to(ACC))[:, None], (C, WP))
    if SLOT_RULE:
        left *= 1 - strength[:, None] * weight
    tl.store(factor + at, left, mask=there)
    tl.debug_barrier()

    # A lane meets, newest first, what was written to its slot before it. meets[t, s] = sum_i k_ti L(s, t) k_si beta_s.
    s = tl.arange(0, C)[None, :]
    pointer = tl.load(prev + at, mask=there, other=-1).to(tl.int32)
    product = left
    hops = tl.zeros((C, WP), tl.int32)
    meets = tl.zeros((C, C), ACC)
    for step in range(C):
        now = C - 1 - step
        hit = (pointer >= 0) & (pointer // WP == now)
        push, own, pointer_before = _take_write(
            pointer, hit, first, head, write_weight, beta, factor, prev, H, W, WP, ACC
        )
        column = tl.sum(tl.where(hit, weight * product * push, 0), 1)
        meets += tl.where(s == now, column[:, None], 0)
        product = tl.where(hit, product * own, product)
        pointer = tl.where(hit, pointer_before, pointer)
        hops += hit.to(tl.int32)
    index = tl.load(write_index + at, mask=there, other=0)
    tl.store(keep + at, tl.where((index >= 0) & (index < N), product, float("nan")), mask=there)
    deepest = tl.max(hops)

    # The same for reads, which meet the write of their own token too.
    j = tl.arange(0, RP)[None, :]
    there_r = live[:, None] & below(j, R, RP)
    at_r = cell[:, None] * R + j
    weight_r = tl.load(read_weight + at_r, mask=there_r, other=0).to(ACC)
    pointer = tl.load(seen + at_r, mask=there_r, other=-1).to(tl.int32)
    product = tl.full((C, RP), 1, ACC)
    hops = tl.zeros((C, RP), tl.int32)
    mixes = tl.zeros((C, C), ACC)
    for step in range(C):
        now = C - 1 - step
        hit = (pointer >= 0) & (pointer // WP == now)
        push, own, pointer_before = _take_write(
            pointer, hit, first, head, write_weight, beta, factor, prev, H, W, WP, ACC
        )
        column = tl.sum(tl.where(hit, weight_r * product * push, 0), 1)
        mixes += tl.where(s == now, column[:, None], 0)
        product = tl.where(hit, product * own, product)
        pointer = tl.where(hit, pointer_before, pointer)
        hops += hit.to(tl.int32)
    index = tl.load(read_index + at_r, mask=there_r, other=0)
    tl.store(read_keep + at_r, tl.where((index >= 0) & (index < N), product, float("nan")), mask=there_r)
    tl.store(depth + first * H + head, tl.maximum(deepest, tl.max(hops)))
    tl.store(mix + cell[:, None] * C + s, mixes, mask=live[:, None])

    # (I + meets)^-1, row by row. A zero is a pair of tokens that share no slot: no NaN may pass between them.
    row = t[:, None]
    inverse = tl.where(row == s, 1.0, 0.0).to(ACC)
    if not SLOT_RULE:
        for now in range(1, C):
            of_row = tl.sum(tl.where(row == now, meets, 0), 0)
            of_rows = tl.sum(tl.where(row == s, of_row[None, :], 0), 1)[:, None]
            met = tl.sum(tl.where((of_rows != 0) & (inverse != 0) & (row < now), of_rows * inverse, 0), 0)
            inverse = tl.where(row == now, inverse - met[None, :], inverse)
        tl.store(solve + cell[:, None] * C + s, inverse, mask=live[:, None])
