"""Product-key selection by the compiled core, registered as a torch op."""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.native import call_core, missing_because
from sdm.ops.backends import Backend, core_unsupported_reason, goes_past_dispatcher
from sdm.ops.checks import check_kernel_floats
from sdm.ops.product_key.inputs import Call, check_scores
from sdm.ops.registration import Context, register


def _run(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    n = scores.shape[-1] // 2
    values, index = _empty_outputs(scores, k)
    rows = scores.numel() // (2 * n)
    scores = scores.contiguous()
    call_core("product_key_topk", scores.dtype, rows=rows, n=n, k=k, scores=scores, values=values, index=index)
    return values, index


def _checked_run(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    check_scores(scores, k)
    check_kernel_floats(scores.dtype, scores=scores)
    return _run(scores, k)


def _empty_outputs(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values = scores.new_empty((*scores.shape[:-1], k))
    return values, torch.empty_like(values, dtype=torch.int64)


def _backward(grad_values: Tensor, index: Tensor, n: int) -> Tensor:
    check_kernel_floats(grad_values.dtype, grad_values=grad_values)
    if index.dtype != torch.int64 or not index.is_cpu:
        raise TypeError(f"index must be an int64 tensor on the CPU, got {index.dtype} on {index.device}")
    if index.dim() < 1 or index.shape != grad_values.shape or not 1 <= index.shape[-1] <= n * n or n < 1:
        raise ValueError(
            f"index and grad_values must both be [..., k] with k in [1, n * n] = [1, {n * n}], "
            f"got shapes {list(index.shape)} and {list(grad_values.shape)}"
        )
    grad_scores, k = _empty_gradient(grad_values, index, n), index.shape[-1]
    call_core(
        "product_key_topk_backward",
        grad_values.dtype,
        rows=index.numel() // k,
        n=n,
        k=k,
        grad_values=grad_values.contiguous(),
        index=index.contiguous(),
        grad_scores=grad_scores,
    )
    return grad_scores


def _empty_gradient(grad_values: Tensor, index: Tensor, n: int) -> Tensor:
    return grad_values.new_empty((*index.shape[:-1], 2 * n))


def _save(ctx: Context, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])
    ctx.n = inputs[0].shape[-1] // 2


def _gradients(ctx: Context, grad_values: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    return torch.ops.sdm.product_key_topk_backward(grad_values, ctx.saved_tensors[0], ctx.n), None


def _save_index(ctx: Context, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.n = inputs[2]


def _second_gradients(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
    # The gradient is linear in grad_values: its own gradient picks the two scores of each slot again.
    (index,) = ctx.saved_tensors
    return grad.gather(-1, index // ctx.n) + grad.gather(-1, ctx.n + index % ctx.n), None, None


register(
    "product_key_topk(Tensor scores, SymInt k) -> (Tensor values, Tensor index)",
    _checked_run,
    _empty_outputs,
    _gradients,
    _save,
)
register(
    "product_key_topk_backward(Tensor grad_values, Tensor index, SymInt n) -> Tensor",
    _backward,
    _empty_gradient,
    _second_gradients,
    _save_index,
)


def product_key_topk_native(call: Call) -> tuple[Tensor, Tensor]:
    """Serve a call with the compiled core."""
    scores, k = call.in_full()
    values, index = (_run if goes_past_dispatcher(scores) else torch.ops.sdm.product_key_topk)(scores, k)
    return values, index


NATIVE = Backend("native", product_key_topk_native, None, "cpu", missing_because, core_unsupported_reason)
