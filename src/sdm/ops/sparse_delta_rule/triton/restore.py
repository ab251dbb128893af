"""Makes tables ready for the next documents: what a document has touched is as it was.

A program owns S channels of one document and head and walks its chunks. Rows that the document wrote are set to the
initial ones. In backward their allowance is unlimited again, and the gradient of each touched row is added to a total
over documents and set to zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdm.ops.sparse_delta_rule.triton.sequences import at_cell, below, sequence_bounds


@triton.jit
def _settle(grad_table, total, slot, touched, channel, lane, D):  # type: ignore[no-untyped-def]
    """Add the gradients of the touched slots [C,X] to the total, and forget them."""
    at = slot.to(tl.int64)[:, :, None] * D + channel[None, None, :]
    mask = touched[:, :, None] & lane[None, None, :]
    gradient = tl.load(grad_table + at, mask=mask, other=0)
    tl.store(total + at, tl.load(total + at, mask=mask, other=0) + gradient, mask=mask)
    tl.store(grad_table + at, tl.zeros_like(gradient), mask=mask)


@triton.jit(do_not_specialize=["time", "begin"])
def restore_kernel(  # type: ignore[no-untyped-def]
    cu_seqlens, write_slot, read_slot, initial, table, allowance, grad_table, total,
    time, begin, N, streams, totals,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, WP: tl.constexpr, RP: tl.constexpr, S: tl.constexpr,
    INITIAL: tl.constexpr, BACKWARD: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Give the rows that a document has touched their initial values back."""
    slabs = tl.cdiv(D, S)
    slab = tl.program_id(0) % slabs
    local = tl.program_id(0) // slabs
    stream = begin + local
    head = stream % H
    start, end = sequence_bounds(cu_seqlens, stream // H, time, True)
    channel = slab * S + tl.arange(0, S)
    lane = below(channel, D, S)
    table += local.to(tl.int64) * N * D
    if INITIAL:
        initial += head.to(tl.int64) * N * D
    if BACKWARD:
        allowance += (slab.to(tl.int64) * streams + local) * N
        grad_table += local.to(tl.int64) * N * D
    if TOTAL:
        total += (stream % totals).to(tl.int64) * N * D
    t = tl.arange(0, C)
    i = tl.arange(0, WP)[None, :]
    j = tl.arange(0, RP)[None, :]
    for first in range(start, end, C):
        live = (first + t < end)[:, None]
        slots = at_cell(write_slot, first, head, H, W) + (t * H * W)[:, None] + i
        slot = tl.load(slots, mask=live & below(i, W, WP), other=-1)
        # A slot is marked once among the writes of a chunk, and once among its reads.
        touched = slot >= 0
        at = slot.to(tl.int64)[:, :, None] * D + channel[None, None, :]
        mask = touched[:, :, None] & lane[None, None, :]
        rows = tl.zeros((C, WP, S), table.dtype.element_ty)
        if INITIAL:
            rows = tl.load(initial + at, mask=mask, other=0).to(table.dtype.element_ty)
        tl.store(table + at, rows, mask=mask)
        if BACKWARD:
            tl.store(allowance + slot, tl.full((C, WP), float("inf"), allowance.dtype.element_ty), mask=touched)
            slots_r = at_cell(read_slot, first, head, H, R) + (t * H * R)[:, None] + j
            slot_r = tl.load(slots_r, mask=live & below(j, R, RP), other=-1)
            if TOTAL:
                _settle(grad_table, total, slot, touched, channel, lane, D)
                tl.debug_barrier()
                _settle(grad_table, total, slot_r, slot_r >= 0, channel, lane, D)
            else:
                tl.store(grad_table + at, tl.zeros_like(rows), mask=mask)
                at_r = slot_r.to(tl.int64)[:, :, None] * D + channel[None, None, :]
                read = (slot_r >= 0)[:, :, None] & lane[None, None, :]
                tl.store(grad_table + at_r, tl.zeros((C, RP, S), grad_table.dtype.element_ty), mask=read)
        tl.debug_barrier()
