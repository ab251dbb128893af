"""With N = W = R and every slot named, the sparse rule is the gated delta rule (the paper's "Connection to GDN")."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import assert_close, assert_identical, cpu_backends, matrix_backends, outputs_and_gradients
from sdm.ops import gated_delta_rule, sparse_delta_rule

B, T, H, K, D = 2, 75, 2, 8, 6


@pytest.fixture
def inputs() -> list[Tensor]:
    size = (B, T, H)
    query, key = torch.randn(2, *size, K, dtype=torch.float64)
    key = torch.nn.functional.normalize(key, dim=-1)
    value, beta = torch.randn(*size, D, dtype=torch.float64), torch.rand(size, dtype=torch.float64)
    return [query, key, value, beta, -torch.rand(size, dtype=torch.float64), torch.randn(H, K, D, dtype=torch.float64)]


def dense(backend: str, cu_seqlens: Tensor | None = None):  # type: ignore[no-untyped-def]
    def run(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor):  # type: ignore[no-untyped-def]
        return gated_delta_rule(
            query, key, value, beta, log_decay,
            initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, backend=backend,
        )  # fmt: skip

    return run


def sparse(backend: str, cu_seqlens: Tensor | None = None):  # type: ignore[no-untyped-def]
    def run(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor):  # type: ignore[no-untyped-def]
        all_slots = torch.arange(K).expand(*query.shape)
        return sparse_delta_rule(
            all_slots, key, value, beta, log_decay, all_slots, query,
            initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, backend=backend,
        )  # fmt: skip

    return run


def test_the_references_agree_to_the_bit(inputs: list[Tensor]) -> None:
    assert_identical(sparse("reference")(*inputs), dense("reference")(*inputs))


@pytest.mark.parametrize("backend", matrix_backends())
def test_every_backend_agrees(backend: str, inputs: list[Tensor]) -> None:
    expected = outputs_and_gradients(dense("reference"), inputs)
    assert_close(outputs_and_gradients(sparse(backend), inputs), expected, 1e-12)
    if backend in cpu_backends("gated_delta_rule"):
        assert_close(outputs_and_gradients(dense(backend), inputs), expected, 1e-12)
    packed = [x.flatten(0, 1)[None] for x in inputs[:5]] + inputs[5:]
    cu_seqlens = torch.tensor([0, 10, 90, 150])
    expected = outputs_and_gradients(dense("reference", cu_seqlens), packed)
    assert_close(outputs_and_gradients(sparse(backend, cu_seqlens), packed), expected, 1e-12)
