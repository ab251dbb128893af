"""Sequences whose tokens differ by orders of magnitude, and how far float32 gradients are from float64 on them.

The error of a gradient is taken per block of tokens: the norm of the difference over the norm of what float64 gives for
that block, so that a loud stretch of the sequence cannot hide a quiet one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from helpers import random_tokens
from sdm.ops import sparse_delta_rule
from sdm.ops.sparse_delta_rule.inputs import Tokens

BLOCK = 20
NAMES = ("write_weight", "value", "beta", "log_decay", "read_weight", "initial_state")

Run = Callable[..., tuple[Tensor, Tensor]]


class Configuration(NamedTuple):
    tokens: Tokens  # float64 that float32 holds exactly
    state: Tensor
    update: str
    cotangent: Tensor


def scales(size: int, decades: float) -> Tensor:
    """[size] powers of ten in runs of random length: a quiet stretch, then a loud one."""
    length = int(torch.randint(1, 40, ()))
    levels = 10 ** (decades * (2 * torch.rand(size // length + 1, dtype=torch.float64) - 1))
    if torch.rand(()) < 0.5:  # most are ordinary, a few quiet or loud
        levels[torch.rand(levels.shape) < 0.8] = 1
    return levels.repeat_interleave(length)[:size]


def draw_configuration(seed: int) -> Configuration:
    """Values, write strengths, write weights, decays and the initial state each at scales of their own."""
    torch.manual_seed(seed)

    def one_of(*choices: float) -> float:
        return choices[int(torch.randint(len(choices), ()))]

    T, D = 200, int(one_of(4, 16, 70))
    W = int(one_of(1, 2, 8))
    N = int(one_of(8, 24, 64))
    update = "slot" if one_of(0, 0, 1) else "delta"
    tokens = random_tokens(
        1, T, 1, W=W, R=8, N=N, D=D, decay=one_of(0, 0.001, 0.02, 0.2, 8), per_write=one_of(0, 1) == 1
    )
    over_time = scales(T, one_of(0, 2, 8))[None, :, None]
    tokens.value.mul_(over_time[..., None])
    tokens.beta.mul_(torch.minimum(scales(T, one_of(0, 3, 8))[None, :, None], torch.ones(())))
    if one_of(0, 1):
        tokens.beta[:, :20] = tokens.beta[:, ::10] = 10 ** -one_of(1, 3, 5, 7)
    if one_of(0, 1) and W > 1:
        tokens.write_weight.copy_((8 * torch.randn_like(tokens.write_weight)).softmax(-1))
    state = torch.randn(1, N, D, dtype=torch.float64) * scales(N, one_of(0, 2, 8))[:, None] * one_of(0, 1e-8, 0.002, 1)
    cotangent = torch.randn(1, T, 1, D, dtype=torch.float64)
    cotangent[:, int(one_of(20, 60, T)) :] = 0
    exact = Tokens(*(x.float().double() if x.is_floating_point() else x for x in tokens))
    return Configuration(exact, state.float().double(), update, cotangent.float().double())


def gradients(configuration: Configuration, run: Run, dtype: torch.dtype) -> list[Tensor]:
    tokens, state = configuration.tokens.to(dtype), configuration.state.to(dtype)
    inputs = Tokens(*(x.clone().requires_grad_() if x.is_floating_point() else x for x in tokens))
    state = state.clone().requires_grad_()
    y, _ = run(inputs, state, configuration.update)
    leaves = [x for x in inputs if x.requires_grad]
    return list(torch.autograd.grad(y, [*leaves, state], configuration.cotangent.to(dtype)))


def expected_gradients(configuration: Configuration) -> list[Tensor]:
    """In float64, by the reference."""

    def reference(tokens: Tokens, state: Tensor, update: str) -> tuple[Tensor, Tensor | None]:
        return sparse_delta_rule(*tokens, initial_state=state, update=update, backend="reference")

    return gradients(configuration, reference, torch.float64)  # type: ignore[arg-type]


def block_errors(actual: list[Tensor], expected: list[Tensor]) -> Tensor:
    """[tensor, block]; the gradient of the initial state is one block, repeated."""
    errors = []
    for a, e in zip(actual, expected, strict=True):
        if e.dim() == 3 and e.shape[0] == 1 and a is actual[-1]:
            blocks = [(a, e)] * (actual[0].shape[1] // BLOCK)
        else:
            blocks = list(zip(a.split(BLOCK, dim=1), e.split(BLOCK, dim=1), strict=True))
        errors.append([_error(x.double(), y) for x, y in blocks])
    return torch.tensor(errors, dtype=torch.float64)


def _error(actual: Tensor, expected: Tensor) -> float:
    # Below what float32 can hold, zero is as good an answer as any.
    floor = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps
    return float((actual - expected).norm() / expected.norm().clamp(min=floor))
