"""Adds up what the programs of backward left of each gradient, slab after slab: always in the same order."""

from __future__ import annotations

import triton
import triton.language as tl

from sdm.ops.sparse_delta_rule.triton.sequences import chunk_bounds


@triton.jit(do_not_specialize=["documents", "time", "begin", "count", "low", "high", "span", "slabs"])
def reduce_kernel(  # type: ignore[no-untyped-def]
    partial, cu_seqlens, grad_write_weight, grad_read_weight, grad_log_decay, grad_beta,
    documents, time, begin, count, low, high, span, slabs,
    H: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, X: tl.constexpr, PACKED: tl.constexpr, PER_WRITE: tl.constexpr,
):  # fmt: skip
    """Add up the partial gradients of all slabs of value channels."""
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    first, end, sequence = chunk_bounds(cu_seqlens, chunk, documents, time, C, PACKED)
    # Only those that have just been walked left parts.
    stream = sequence * H + head
    if stream < begin:
        return
    if stream >= begin + count:
        return
    row = chunk.to(tl.int64) * 0
    rows = 1
    if not PACKED:
        row = (chunk // tl.cdiv(time, C)).to(tl.int64)
        rows = documents
    position = first - row * time
    if first >= end:
        return
    if position + C <= low:
        return
    if position >= high:
        return
    gates = 1
    if PER_WRITE:
        gates = W
    width = W + R + gates + 1
    t = tl.arange(0, C)
    live = ((first + t < end) & (position + t >= low) & (position + t < high))[:, None]
    cell = ((first + t) * H + head)[:, None]
    source = partial + ((row * span + position - low + t) * H + head)[:, None] * width
    size = rows * span.to(tl.int64) * H * width
    for block in range(0, width, X):
        x = block + tl.arange(0, X)[None, :]
        total = tl.zeros((C, X), partial.dtype.element_ty)
        for slab in range(slabs):
            total += tl.load(source + slab * size + x, mask=live & (x < width), other=0)
        tl.store(grad_write_weight + cell * W + x, total, mask=live & (x < W))
        x -= W
        tl.store(grad_read_weight + cell * R + x, total, mask=live & (x >= 0) & (x < R))
        x -= R
        tl.store(grad_log_decay + cell * gates + x, total, mask=live & (x >= 0) & (x < gates))
        x -= gates
        tl.store(grad_beta + cell + x, total, mask=live & (x == 0))
