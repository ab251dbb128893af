"""Random inputs of the ops, and the comparison that every backend must pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm.ops import available_backends
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.ops.triton.backend import interpreting


def cpu_backends(op: str = "sparse_delta_rule") -> list[str]:
    """The backends of an op that serve calls on the CPU here, slowest first: of those for GPUs, what is interpreted."""
    return [name for name in available_backends(op) if name != "fla" and (name != "triton" or interpreting())]


def matrix_backends(op: str = "sparse_delta_rule") -> list[Any]:
    """The same as parameters of tests with many cases: what is interpreted takes minutes for them."""
    return [pytest.param(name, marks=pytest.mark.slow if name == "triton" else ()) for name in cpu_backends(op)]


def distinct_slots(shape: Sequence[int], count: int, num_slots: int) -> Tensor:
    """[*shape, count] sorted, distinct slots."""
    return torch.rand(*shape, num_slots).argsort(-1)[..., :count].sort(-1).values


def random_tokens(
    B: int = 2,
    T: int = 13,
    H: int = 2,
    W: int = 3,
    R: int = 4,
    N: int = 9,
    D: int = 5,
    *,
    dtype: torch.dtype = torch.float64,
    decay: float = 0.4,
    per_write: bool = False,
) -> Tokens:
    gates = (B, T, H)
    return Tokens(
        write_index=distinct_slots(gates, W, N),
        write_weight=torch.randn(*gates, W, dtype=dtype).softmax(-1),
        value=torch.randn(*gates, D, dtype=dtype),
        beta=torch.rand(*gates, dtype=dtype),
        log_decay=-decay * torch.rand(*gates, W, dtype=dtype)
        if per_write
        else -decay * torch.rand(*gates, dtype=dtype),
        read_index=distinct_slots(gates, R, N),
        read_weight=torch.randn(*gates, R, dtype=dtype).softmax(-1),
    )


def outputs_and_gradients(
    run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """All outputs of `run(*inputs)` and the gradients of every float input under fixed random cotangents."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() if x.is_floating_point() else x.detach() for x in inputs]
    outputs = run(*leaves)
    generator = torch.Generator().manual_seed(1)
    loss = sum((y.double() * torch.randn(y.shape, generator=generator, dtype=torch.float64)).sum() for y in outputs)
    differentiable = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(loss, differentiable, materialize_grads=True)  # type: ignore[arg-type]
    return [*(y.detach() for y in outputs), *gradients]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest deviation, relative to the largest expected magnitude."""
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    assert len(actual) == len(expected)
    for position, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape, f"tensor {position}: shape {list(a.shape)}, expected {list(e.shape)}"
        assert a.isfinite().all(), f"tensor {position} is not finite"
        error = relative_error(a, e)
        assert error <= tolerance, f"tensor {position}: relative error {error:.3g} > {tolerance:g}"


def assert_identical(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for position, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), f"tensor {position} differs by up to {relative_error(a, e):.3g}"
