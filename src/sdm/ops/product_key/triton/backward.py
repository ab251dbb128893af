"""The kernel of the gradient: each score adds up the gradients of the slots that it is part of, in their order.

A slot is found by comparing, so that nothing is added atomically and the result does not depend on who comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_values_ptr,  # [rows, k]
    index_ptr,  # [rows, k]
    grad_scores_ptr,  # [rows, 2n], written
    rows,
    n: tl.constexpr,
    k: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add up the gradients of the selected sums for each score of both halves."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    for start in range(0, n, BLOCK_N):
        i = start + tl.arange(0, BLOCK_N)[None, :]
        first = tl.zeros([ROWS, BLOCK_N], tl.float32)
        second = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for place in range(0, k, BLOCK_K):
            at = place + tl.arange(0, BLOCK_K)[None, :]
            grad = tl.load(grad_values_ptr + row * k + at, mask=inside & (at < k), other=0.0).to(tl.float32)
            slot = tl.load(index_ptr + row * k + at, mask=inside & (at < k), other=-1).to(tl.int32)
            in_first = (slot // n)[:, None, :] == i[:, :, None]
            in_second = (slot % n)[:, None, :] == i[:, :, None]
            first += tl.sum(tl.where(in_first, grad[:, None, :], 0.0), 2)
            second += tl.sum(tl.where(in_second, grad[:, None, :], 0.0), 2)
        wanted = inside & (i < n)
        out = grad_scores_ptr + row * (2 * n) + i
        tl.store(out, first.to(grad_scores_ptr.dtype.element_ty), mask=wanted)
        tl.store(out + n, second.to(grad_scores_ptr.dtype.element_ty), mask=wanted)
