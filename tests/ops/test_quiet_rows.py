"""Backward recovers old rows by inverting writes: rows that hold little must survive pushes that are much larger."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from adversarial import NAMES, Configuration, block_errors, draw_configuration, expected_gradients, gradients
from helpers import random_tokens
from sdm.ops import available_backends
from sdm.ops.sequences import Call
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.ops.sparse_delta_rule.native import saved_rows, sparse_delta_rule_native

pytestmark = pytest.mark.skipif("native" not in available_backends(), reason="the compiled core is missing")

TOLERANCE = 1e-4


def native(**options: Any) -> Any:
    def run(tokens: Tokens, state: Tensor, update: str) -> tuple[Tensor, Tensor]:
        return sparse_delta_rule_native(Call(tokens, state, state.shape[-2], update=update), **options)

    return run


def quiet_tokens(beta: float) -> Configuration:
    """The first 20 tokens and every tenth write almost nothing, and the loss is on the first 20."""
    torch.manual_seed(0)
    tokens = random_tokens(1, 200, 1, W=8, R=8, N=64, D=16, decay=0.02)
    tokens.beta[:, :20] = tokens.beta[:, ::10] = beta
    exact = Tokens(*(x.float().double() if x.is_floating_point() else x for x in tokens))
    cotangent = torch.randn(1, 200, 1, 16).double()
    cotangent[:, 20:] = 0
    return Configuration(exact, torch.zeros(1, 64, 16, dtype=torch.float64), "delta", cotangent)


@pytest.mark.parametrize("beta", [1e-5, 1e-6, 1e-7])
def test_quiet_tokens_before_loud_ones(beta: float) -> None:
    configuration = quiet_tokens(beta)
    errors = block_errors(gradients(configuration, native(), torch.float32), expected_gradients(configuration))
    assert errors.max() <= 1e-5, dict(zip(NAMES, errors.amax(1).tolist(), strict=True))


def test_the_search_sees_what_inverting_everything_loses() -> None:
    """Otherwise passing it would mean nothing."""
    configuration = quiet_tokens(1e-6)
    inverted = gradients(configuration, native(rounding_limit=math.inf), torch.float32)
    assert not block_errors(inverted, expected_gradients(configuration)).max() < 100 * TOLERANCE


def check(seed: int) -> None:
    configuration = draw_configuration(seed)
    errors = block_errors(gradients(configuration, native(), torch.float32), expected_gradients(configuration))
    assert errors.max() <= TOLERANCE, f"seed {seed}: {dict(zip(NAMES, errors.amax(1).tolist(), strict=True))}"


@pytest.mark.parametrize("seed", range(12))
def test_mixed_scales(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(12, 412, 50))
def test_many_mixed_scales(first: int) -> None:
    for seed in range(first, first + 50):
        check(seed)


def test_share_of_copied_rows_with_a_small_initial_state() -> None:
    """At ordinary gates, and with rows that start far below what is pushed on them."""
    T, N, W = 1024, 1024, 16
    torch.manual_seed(0)
    tokens = random_tokens(1, T, 1, W=W, R=1, N=N, D=24, dtype=torch.float32)
    tokens = tokens._replace(log_decay=torch.full((1, T, 1), -0.18))
    assert saved_rows(tokens, N, 0.002 * torch.randn(1, N, 24)) <= 0.07 * T * W
