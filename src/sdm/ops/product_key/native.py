"""Product-key selection by the compiled core, registered as a torch op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm.native import missing_because, require_core
from sdm.ops.backends import Backend, core_refuses, goes_past_dispatcher
from sdm.ops.checks import check_kernel_floats, check_one_device
from sdm.ops.product_key.inputs import Call, check_scores


def _run(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    scores = scores.contiguous()
    *lead, width = scores.shape
    n = width // 2
    values = torch.empty(*lead, k, dtype=scores.dtype)
    index = torch.empty(*lead, k, dtype=torch.int64)
    require_core().product_key_topk(
        scores.data_ptr(),
        values.data_ptr(),
        index.data_ptr(),
        scores.numel() // (2 * n),
        n,
        k,
        scores.dtype == torch.float64,
        torch.get_num_threads(),
    )
    return values, index


@torch.library.custom_op("sdm::product_key_topk", mutates_args=(), device_types="cpu")
def _topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    check_scores(scores, k)
    check_kernel_floats(scores.dtype, scores=scores)
    return _run(scores, k)


@_topk.register_fake
def _(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values = scores.new_empty((*scores.shape[:-1], k))
    return values, torch.empty_like(values, dtype=torch.int64)


@torch.library.custom_op("sdm::product_key_topk_backward", mutates_args=(), device_types="cpu")
def _topk_backward(grad_values: Tensor, index: Tensor, n: int) -> Tensor:
    check_kernel_floats(grad_values.dtype, grad_values=grad_values)
    if index.dtype != torch.int64 or not index.is_cpu:
        raise TypeError(f"index must be an int64 tensor on the CPU, got {index.dtype} on {index.device}")
    if index.dim() < 1 or index.shape != grad_values.shape or not 1 <= index.shape[-1] <= n * n or n < 1:
        raise ValueError(
            f"index and grad_values must both be [..., k] with k in [1, n * n] = [1, {n * n}], "
            f"got shapes {list(index.shape)} and {list(grad_values.shape)}"
        )
    grad_values, index = grad_values.contiguous(), index.contiguous()
    grad_scores = grad_values.new_empty((*index.shape[:-1], 2 * n))
    require_core().product_key_topk_backward(
        grad_values.data_ptr(),
        index.data_ptr(),
        grad_scores.data_ptr(),
        index.numel() // index.shape[-1],
        n,
        index.shape[-1],
        grad_values.dtype == torch.float64,
        torch.get_num_threads(),
    )
    return grad_scores


@_topk_backward.register_fake
def _(grad_values: Tensor, index: Tensor, n: int) -> Tensor:
    check_one_device(grad_values, index)
    return grad_values.new_empty((*index.shape[:-1], 2 * n))


def _save(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])
    ctx.n = inputs[0].shape[-1] // 2


def _backward(ctx: Any, grad_values: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    return _topk_backward(grad_values, ctx.saved_tensors[0], ctx.n), None


def _backward_of_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    # The gradient is linear in grad_values: its own gradient picks the two scores of each slot again.
    (index,) = ctx.saved_tensors
    return grad.gather(-1, index // ctx.n) + grad.gather(-1, ctx.n + index % ctx.n), None, None


def _save_index(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.n = inputs[2]


torch.library.register_autograd("sdm::product_key_topk", _backward, setup_context=_save)
torch.library.register_autograd("sdm::product_key_topk_backward", _backward_of_backward, setup_context=_save_index)


def product_key_topk_native(call: Call) -> tuple[Tensor, Tensor]:
    scores, k = call.in_full()
    return (_run if goes_past_dispatcher(scores) else _topk)(scores, k)


NATIVE = Backend("native", product_key_topk_native, None, "cpu", missing_because, core_refuses)
