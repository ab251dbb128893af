"""One token of every sequence and head, in one launch: a program owns S channels of one (sequence, head).

It reads its W rows, writes them, and reads R rows after the write.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step_kernel(  # type: ignore[no-untyped-def]
    write_index, write_weight, value, beta, log_decay, read_index, read_weight, state, y,
    H, N, D, W, R,
    WP: tl.constexpr, RP: tl.constexpr, S: tl.constexpr, ACC: tl.constexpr,
    PER_WRITE: tl.constexpr, SLOT_RULE: tl.constexpr,
):  # fmt: skip
    """Write and read one token of each stream in place."""
    slabs = tl.cdiv(D, S)
    cell = (tl.program_id(0) // slabs).to(tl.int64)
    channel = tl.program_id(0) % slabs * S + tl.arange(0, S)
    lane = channel < D
    state += cell * N * D
    i = tl.arange(0, WP)
    index = tl.load(write_index + cell * W + i, mask=i < W, other=0).to(tl.int64)
    inside = (index >= 0) & (index < N)
    weight = tl.load(write_weight + cell * W + i, mask=i < W, other=0).to(ACC)
    # A slot that is not there is not written, and shows.
    weight = tl.where(inside, weight, float("nan"))
    wanted = ((i < W) & inside)[:, None] & lane[None, :]
    address = state + index[:, None] * D + channel[None, :]
    rows = tl.load(address, mask=wanted, other=0).to(ACC)
    if PER_WRITE:
        rows *= tl.exp(tl.load(log_decay + cell * W + i, mask=i < W, other=0).to(ACC))[:, None]
    else:
        rows *= tl.exp(tl.load(log_decay + cell).to(ACC))
    pushed = tl.load(value + cell * D + channel, mask=lane, other=0).to(ACC)[None, :]
    if SLOT_RULE:
        pushed = pushed - rows
    else:
        pushed = pushed - tl.sum(tl.where((i < W)[:, None], weight[:, None] * rows, 0), 0)[None, :]
    rows += weight[:, None] * (tl.load(beta + cell).to(ACC) * pushed)
    # Where rows are fewer than threads, several warps have read the same ones.
    tl.debug_barrier()
    tl.store(address, rows.to(state.dtype.element_ty), mask=wanted)
    tl.debug_barrier()

    j = tl.arange(0, RP)
    index_r = tl.load(read_index + cell * R + j, mask=j < R, other=0).to(tl.int64)
    inside_r = (index_r >= 0) & (index_r < N)
    weight_r = tl.load(read_weight + cell * R + j, mask=j < R, other=0).to(ACC)
    weight_r = tl.where(inside_r, weight_r, float("nan"))
    wanted_r = ((j < R) & inside_r)[:, None] & lane[None, :]
    read = tl.load(state + index_r[:, None] * D + channel[None, :], mask=wanted_r, other=0).to(ACC)
    output = tl.sum(tl.where((j < R)[:, None], weight_r[:, None] * read, 0), 0)
    tl.store(y + cell * D + channel, output, mask=lane)
