"""An infinity or NaN reaches what the reference lets it reach, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import matrix_backends, random_tokens
from sdm.ops import available_backends, gated_delta_rule, sparse_delta_rule

BACKENDS = matrix_backends()[1:]  # all but the reference
DENSE = [name for name in ("chunked", "native") if name in available_backends()]
AT = 8  # the token that is spoiled; the loss ends before it, unless a test says otherwise


def spoilt(*names: str) -> list[tuple[str, float]]:
    """What is put where. Of log_decay, all backends refuse the other two."""
    return [(name, bad) for name in names for bad in (math.nan, math.inf, -math.inf)] + [("log_decay", -math.inf)]


def spoiled(inputs: dict[str, Tensor], name: str, bad: float) -> dict[str, Tensor]:
    inputs = {key: x.clone() for key, x in inputs.items()}
    inputs[name][:, AT].view(-1)[0] = bad
    return inputs


def outputs_and_gradients(op: Any, inputs: dict[str, Tensor], state: Tensor, end: int, **options: Any) -> list[Tensor]:
    leaves = {key: x.requires_grad_() if x.is_floating_point() else x for key, x in inputs.items()}
    state = state.clone().requires_grad_()
    y, final_state = op(**leaves, initial_state=state, output_final_state=True, **options)
    wanted = [x for x in leaves.values() if x.requires_grad] + [state]
    return [y.detach(), final_state.detach(), *torch.autograd.grad(y[:, :end].sum(), wanted)]


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for position, (a, e) in enumerate(zip(actual, expected, strict=True)):
        finite = e.isfinite()
        assert torch.equal(a.isfinite(), finite), f"tensor {position} is finite in other places"
        torch.testing.assert_close(a[finite], e[finite], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("update", ["delta", "slot"])
@pytest.mark.parametrize(("name", "bad"), spoilt("value", "beta", "write_weight", "read_weight"))
@pytest.mark.parametrize("end", [AT, 20])
def test_sparse_delta_rule(backend: str, update: str, bad: float, name: str, end: int) -> None:
    inputs = spoiled(random_tokens(1, 20, 1)._asdict(), name, bad)
    state = torch.randn(1, 9, 5, dtype=torch.float64)
    expected = outputs_and_gradients(sparse_delta_rule, inputs, state, end, update=update, backend="reference")
    actual = outputs_and_gradients(sparse_delta_rule, inputs, state, end, update=update, backend=backend)
    assert_same(actual, expected)
    if end == AT and name == "value":
        assert all(x[:, :AT].isfinite().all() for x in actual[2:7])


@pytest.mark.parametrize("backend", DENSE)
@pytest.mark.parametrize(("name", "bad"), spoilt("query", "key", "value", "beta"))
@pytest.mark.parametrize("end", [AT, 20])
def test_gated_delta_rule(backend: str, bad: float, name: str, end: int) -> None:
    inputs = {
        "query": torch.randn(1, 20, 1, 6, dtype=torch.float64),
        "key": torch.randn(1, 20, 1, 6, dtype=torch.float64) / 3,
        "value": torch.randn(1, 20, 1, 7, dtype=torch.float64),
        "beta": torch.rand(1, 20, 1, dtype=torch.float64),
        "log_decay": -torch.rand(1, 20, 1, dtype=torch.float64),
    }
    inputs = spoiled(inputs, name, bad)
    state = torch.randn(1, 1, 6, 7, dtype=torch.float64)
    expected = outputs_and_gradients(gated_delta_rule, inputs, state, end, backend="reference")
    assert_same(outputs_and_gradients(gated_delta_rule, inputs, state, end, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_that_is_not_a_number(backend: str) -> None:
    """One spoiled entry of the incoming gradient, with a memory that is sound."""
    tokens, state = random_tokens(1, 20, 1), torch.randn(1, 9, 5, dtype=torch.float64)

    def gradients(backend: str) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in tokens]
        y, _ = sparse_delta_rule(*leaves, initial_state=state, backend=backend)
        cotangent = torch.ones_like(y)
        cotangent[:, AT, 0, 0] = math.nan
        return list(torch.autograd.grad(y, [x for x in leaves if x.requires_grad], cotangent))

    actual = gradients(backend)
    assert_same(actual, gradients("reference"))
    assert all(x[:, AT + 1 :].isfinite().all() for x in actual)
