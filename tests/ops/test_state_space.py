"""The state-space rule: the token loop against the equations, and the chunked form against the token loop."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_close, outputs_and_gradients
from sdm.ops import state_space, state_space_step_
from sdm.ops.gated_delta_rule.inputs import Tokens


def random_tokens(
    B: int = 2, T: int = 13, H: int = 2, K: int = 3, D: int = 5, *, decay: float = 0.4, dtype: Any = torch.float64
) -> Tokens:
    gates = (B, T, H)
    return Tokens(
        query=torch.randn(*gates, K, dtype=dtype),
        key=torch.randn(*gates, K, dtype=dtype),
        value=torch.randn(*gates, D, dtype=dtype),
        beta=torch.rand(*gates, dtype=dtype),
        log_decay=-decay * torch.rand(*gates, dtype=dtype),
    )


def run(backend: str, **options: Any) -> Any:
    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        state = inputs[5] if len(inputs) > 5 else None
        y, final = state_space(*inputs[:5], initial_state=state, output_final_state=True, backend=backend, **options)
        assert final is not None
        return y, final

    return call


def compare(inputs: tuple[Tensor, ...], tolerance: float = 1e-12, **options: Any) -> None:
    """Output, final state and every gradient of the chunked form, against the token loop in float64."""
    expected = outputs_and_gradients(run("reference", **options), inputs, torch.float64)
    assert_close(outputs_and_gradients(run("chunked", **options), inputs), expected, tolerance)


def test_reference_is_the_equations() -> None:
    tokens, state = random_tokens(), torch.randn(2, 3, 5, dtype=torch.float64)
    y, final = run("reference")(*tokens, state)
    for b, h in itertools.product(range(2), range(2)):
        M = state[h].clone()
        for t in range(13):
            q, k, v, beta, g = (x[b, t, h] for x in tokens)
            M = g.exp() * M + beta * torch.outer(k, v)
            torch.testing.assert_close(y[b, t, h], M.T @ q)
        torch.testing.assert_close(final[b, h], M)


@pytest.mark.parametrize("time", [0, 1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
def test_chunked_is_the_reference(time: int, shape: tuple[int, int]) -> None:
    batch, heads = shape
    tokens = random_tokens(batch, time, heads)
    compare(tuple(tokens))
    compare((*tokens, torch.randn(heads, 3, 5, dtype=torch.float64)))
    compare((*tokens, torch.randn(batch, heads, 3, 5, dtype=torch.float64)))


@pytest.mark.parametrize("bounds", [[0, 90], [0, 1, 1, 65, 90], [0, 0, 64, 90, 90], [0, 3, 6, 90]])
def test_packed_documents_are_separate(bounds: list[int]) -> None:
    tokens, states = random_tokens(1, 90), torch.randn(len(bounds) - 1, 2, 3, 5, dtype=torch.float64)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    for backend in ("reference", "chunked"):
        y, final = run(backend, cu_seqlens=cu_seqlens)(*tokens, states)
        for document, (start, end) in enumerate(itertools.pairwise(bounds)):
            one = slice(document, document + 1)
            alone = run("reference")(*(x[:, start:end] for x in tokens), states[one])
            assert_close([y[:, start:end], final[one]], alone, 1e-12)
    compare((*tokens, states), cu_seqlens=cu_seqlens)
    compare((*tokens, states[0]), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_splitting_changes_nothing(backend: str) -> None:
    tokens, state = random_tokens(T=67), torch.randn(2, 2, 3, 5, dtype=torch.float64)
    whole = run(backend)(*tokens, state)
    for cuts in ([0, 1, 40, 67], [0, 64, 64, 67]):
        pieces, carried = [], state
        for start, end in itertools.pairwise(cuts):
            y, carried = run(backend)(*(x[:, start:end] for x in tokens), carried)
            pieces.append(y)
        assert_close([torch.cat(pieces, 1), carried], whole, 1e-12)


def test_steps_are_the_rule() -> None:
    tokens, state = random_tokens(), torch.randn(2, 2, 3, 5, dtype=torch.float64)
    y, final = run("reference")(*tokens, state)
    carried = state.clone()
    steps = [state_space_step_(carried, *(x[:, t] for x in tokens)) for t in range(13)]
    assert_close([torch.stack(steps, 1), carried], [y, final], 1e-12)
    low = state.bfloat16()
    y_low = state_space_step_(low, *(x[:, 0].bfloat16() for x in tokens))
    assert low.dtype == y_low.dtype == torch.bfloat16
    assert_close([y_low], [steps[0]], 0.05)


@pytest.mark.parametrize("decay", [0.0, 16.0, 300.0])
def test_strong_decay_stays_finite(decay: float) -> None:
    tokens = random_tokens(T=80, decay=decay, dtype=torch.float32)
    compare((*tokens, torch.randn(2, 3, 5)), 1e-5)


def test_gradcheck() -> None:
    inputs = [x.requires_grad_() for x in (*random_tokens(1, 5, 1, 2, 2), torch.randn(1, 2, 2, dtype=torch.float64))]
    for backend in ("reference", "chunked"):
        assert torch.autograd.gradcheck(run(backend), inputs)


def test_low_precision_and_no_final_state() -> None:
    tokens = random_tokens(dtype=torch.bfloat16)
    y, final = state_space(*tokens)
    assert (y.dtype, final) == (torch.bfloat16, None)
    _, final = state_space(*tokens, output_final_state=True)
    assert final is not None
    assert final.dtype == torch.float32


def test_compiles() -> None:
    tokens = random_tokens(dtype=torch.float32)
    compiled = torch.compile(state_space, backend="aot_eager", fullgraph=True)
    assert_close([compiled(*tokens)[0]], [state_space(*tokens)[0]], 1e-6)


def test_bad_input_is_named() -> None:
    tokens = random_tokens()
    state = torch.zeros(2, 2, 3, 5, dtype=torch.float64)
    for changes, message in (
        ({"beta": tokens.beta[..., 0]}, "beta must be"),
        ({"key": tokens.key[..., :2]}, "key must be"),
        ({"log_decay": -tokens.log_decay}, "log_decay must be at most 0"),
    ):
        with pytest.raises(ValueError, match=message):
            state_space(*tokens._replace(**changes))
    with pytest.raises(ValueError, match="initial_state must be"):
        state_space(*tokens, initial_state=state[..., :4])
    with pytest.raises(ValueError, match="the batch must be 1"):
        state_space(*tokens, cu_seqlens=torch.tensor([0, 13]))
    with pytest.raises(ValueError, match="backend must be one of"):
        state_space(*tokens, backend="native")
    token = Tokens(*(x[:, 0] for x in tokens))
    with pytest.raises(ValueError, match="state must be"):
        state_space_step_(state[:1], *token)
    with pytest.raises(RuntimeError, match="records no gradients"):
        state_space_step_(state, *token._replace(value=token.value.clone().requires_grad_()))
