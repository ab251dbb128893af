"""Launches the kernels of product-key selection, registered as torch ops. Looks at shapes, never at values.

Shapes: n = sqrt(N) scores per half, k selected slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm.ops.product_key.inputs import check_scores
from sdm.ops.registration import Context
from sdm.ops.triton.availability import interpreting
from sdm.ops.triton.launch import launch, load_kernel

LARGEST_TILE = 8192
"""Scores of a half or candidate pairs that a program can sort."""


def unsupported_reason(scores: Tensor, k: int) -> str | None:
    """Return why the kernels cannot serve these scores, or None."""
    n = scores.shape[-1] // 2
    if scores.dtype == torch.float64:
        return "its kernels compute in float32, got torch.float64"
    if max(n, _num_candidates(n, k)) > LARGEST_TILE:
        return f"its kernels sort up to {LARGEST_TILE} scores or sums at once, fewer than k = {k} of {n} x {n} needs"
    return None


def _num_candidates(n: int, k: int) -> int:
    return sum(min(n, k // (a + 1)) for a in range(min(n, k)))


def _log2(size: int) -> int:
    """Of the power of two that a tile of this many numbers takes, at least 2."""
    return max((size - 1).bit_length(), 1)


def _log_rows(rows: int) -> int:
    """Of the rows of a program. The interpreter takes as long for many as for one."""
    return min(_log2(rows), 6) if interpreting() else 0


def _num_warps(log_size: int) -> int:
    """Up to 16 numbers for each thread of a warp: most partners of a number then are in its own warp."""
    return min(max(1 << log_size >> 9, 1), 16)


@torch.library.custom_op("sdm::product_key_topk_triton", mutates_args=())
def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Launch the kernels: the selected sums and slots [..., k]."""
    check_scores(scores, k)
    problem = unsupported_reason(scores, k)
    if problem:
        raise ValueError(problem)

    scores = scores.contiguous()
    *lead, width = scores.shape
    n, rows = width // 2, scores.numel() // width
    values = torch.empty(*lead, k, dtype=torch.float32, device=scores.device)
    index = torch.empty(*lead, k, dtype=torch.int64, device=scores.device)
    log_n, log_kept, log_k = _log2(n), _log2(min(n, k)), _log2(k)
    log_pairs = max(_log2(_num_candidates(n, k)), log_k)
    ranked = torch.empty(rows, 2, 1 << log_kept, dtype=torch.int64, device=scores.device)
    log_rows = _log_rows(2 * rows)
    launch(
        load_kernel(__package__, "kernels", "rank_halves_kernel"),
        (-(-2 * rows // (1 << log_rows)),),
        scores,
        ranked,
        2 * rows,
        n=n,
        LOG_ROWS=log_rows,
        LOG_N=log_n,
        LOG_KEPT=log_kept,
        num_warps=_num_warps(log_n),
    )
    log_rows = _log_rows(rows)
    launch(
        load_kernel(__package__, "kernels", "select_kernel"),
        (-(-rows // (1 << log_rows)),),
        scores,
        ranked,
        values,
        index,
        rows,
        min(n, k),
        n=n,
        k=k,
        LOG_ROWS=log_rows,
        LOG_KEPT=log_kept,
        LOG_PAIRS=log_pairs,
        LOG_K=log_k,
        num_warps=_num_warps(log_pairs),
    )
    return values, index


@torch.library.custom_op("sdm::product_key_topk_triton_backward", mutates_args=())
def topk_backward(grad_values: Tensor, index: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Launch the backward kernel: the gradient of the scores."""
    if index.dtype != torch.int64 or index.dim() < 1 or index.shape != grad_values.shape or n < 1:
        raise ValueError(
            "index must be int64 and have the shape [..., k] of grad_values, "
            f"got {index.dtype} and shapes {list(index.shape)} and {list(grad_values.shape)}"
        )

    *lead, k = index.shape
    rows = index.numel() // k
    grad_scores = torch.empty(*lead, 2 * n, dtype=dtype, device=index.device)
    tile_rows = 1 << _log_rows(rows)
    launch(
        load_kernel(__package__, "kernels", "gather_gradient_kernel"),
        (-(-rows // tile_rows),),
        grad_values.contiguous(),
        index.contiguous(),
        grad_scores,
        rows,
        n=n,
        k=k,
        ROWS=tile_rows,
        BLOCK_N=32,
        BLOCK_K=min(1 << _log2(k), 64),
        num_warps=4,
    )
    return grad_scores


topk.register_fake(topk._init_fn)
topk_backward.register_fake(topk_backward._init_fn)


def _save(ctx: Context, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])
    ctx.n, ctx.dtype = inputs[0].shape[-1] // 2, inputs[0].dtype


def _backward(ctx: Context, grad_values: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    return topk_backward(grad_values, ctx.saved_tensors[0], ctx.n, ctx.dtype), None


def _save_index(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.n = inputs[2]


def _backward_of_backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
    # The gradient is linear in grad_values: its own gradient picks the two scores of each slot again.
    (index,) = ctx.saved_tensors
    return grad.gather(-1, index // ctx.n).float() + grad.gather(-1, ctx.n + index % ctx.n), None, None, None


topk.register_autograd(_backward, setup_context=_save)
topk_backward.register_autograd(_backward_of_backward, setup_context=_save_index)
