"""`sparse_delta_rule_`: T tokens in place, and results that do not depend on how time is cut."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from helpers import assert_close, matrix_backends, random_tokens
from sdm.ops import sparse_delta_rule, sparse_delta_rule_, sparse_delta_step_
from sdm.ops.sparse_delta_rule.inputs import Tokens


def cut(tokens: Tokens, start: int, end: int | None = None) -> list[Tensor]:
    return [x[:, start:end] for x in tokens]


@pytest.mark.parametrize("update", ["delta", "slot"])
@pytest.mark.parametrize("per_write", [False, True])
@pytest.mark.parametrize("backend", matrix_backends())
def test_in_place_equals_the_reference(backend: str, update: str, per_write: bool) -> None:
    tokens = random_tokens(per_write=per_write)
    state = torch.randn(2, 2, 9, 5, dtype=torch.float64)
    y, expected = sparse_delta_rule(
        *tokens, initial_state=state, output_final_state=True, update=update, backend="reference"
    )
    version = state._version
    got = sparse_delta_rule_(state, *tokens, update=update, backend=backend)
    assert_close([got, state], [y, expected], 1e-12)
    assert state._version > version
    assert sparse_delta_rule_(state, *cut(tokens, 0, 0), update=update, backend=backend).shape == (2, 0, 2, 5)


@pytest.mark.parametrize("backend", ["native", "chunked", "reference"])
def test_narrow_states_are_rounded_after_each_write(backend: str) -> None:
    tokens = random_tokens(dtype=torch.float32)
    state = torch.randn(2, 2, 9, 5).bfloat16()
    stepped = state.clone()
    steps = [sparse_delta_step_(stepped, *(x[:, t] for x in tokens), backend=backend) for t in range(13)]
    y = sparse_delta_rule_(state, *tokens, backend=backend)
    assert torch.equal(state, stepped)
    assert torch.equal(y, torch.stack(steps, dim=1))


def test_bad_calls_leave_the_state_as_it_is() -> None:
    tokens, state = random_tokens(dtype=torch.float32), torch.randn(2, 2, 9, 5)
    before = state.clone()
    with pytest.raises(ValueError, match=r"state must be \[B,H,N,D\]"):
        sparse_delta_rule_(state[0], *tokens)
    with pytest.raises(ValueError, match=r"state must be \[B,H,N,D\]"):
        sparse_delta_rule_(state[:1], *tokens)
    with pytest.raises(TypeError, match=r"state must be a torch\.Tensor"):
        sparse_delta_rule_(None, *tokens)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="value must be"):
        sparse_delta_rule_(state, *(x[:, 0] for x in tokens))
    with pytest.raises(ValueError, match="update must be one of"):
        sparse_delta_rule_(state, *tokens, update="erase")
    with pytest.raises(RuntimeError, match=r"records no gradients: .* sparse_delta_rule"):
        sparse_delta_rule_(state.clone().requires_grad_(), *tokens)
    with pytest.raises(ValueError, match="contiguous"):
        sparse_delta_rule_(state.transpose(2, 3).contiguous().transpose(2, 3), *tokens, backend="native")
    for backend in ("native", "chunked", "reference"):
        late = tokens.write_index.clone()
        late[:, -1] = 9
        with pytest.raises(IndexError, match="write_index"):
            sparse_delta_rule_(state, *tokens._replace(write_index=late), backend=backend)
        with pytest.raises(ValueError, match="log_decay must be at most 0"):
            sparse_delta_rule_(state, *tokens._replace(log_decay=tokens.log_decay + 5), backend=backend)
        assert torch.equal(state, before)


def test_registered_ops_pass_opcheck() -> None:
    tokens = random_tokens(1, 6, 1, dtype=torch.float32)
    torch.library.opcheck(torch.ops.sdm.sparse_delta_rule_, (torch.randn(1, 1, 9, 5), *tokens, False))
    torch.library.opcheck(torch.ops.sdm.sparse_delta_rule_chunked_, (torch.randn(1, 1, 9, 5), *tokens, "delta"))


@pytest.mark.parametrize("seed", range(200))
def test_the_cut_of_time_does_not_change_a_bit(seed: int) -> None:
    """Prefill, any two pieces, T tokens in place and T steps, for widths of every kind of slab."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype = (torch.float32, torch.float64)[seed % 2]
    B, T, H = draw.randint(1, 3), draw.randint(1, 40), draw.randint(1, 3)
    N, D = draw.choice([4, 9, 64, 256, 1024]), draw.choice([1, 3, 8, 15, 16, 17, 24, 32, 40, 64, 65, 100, 128, 150])
    W, R = draw.randint(1, min(N, 33)), draw.randint(1, min(N, 40))
    update, per_write = draw.choice(["delta", "delta", "slot"]), draw.random() < 0.3
    tokens = random_tokens(B, T, H, W, R, N, D, dtype=dtype, per_write=per_write)
    start = torch.randn(B, H, N, D, dtype=dtype)
    y, final = sparse_delta_rule(*tokens, initial_state=start, output_final_state=True, update=update)
    assert torch.equal(sparse_delta_rule(*tokens, initial_state=start, update=update)[0], y)

    middle = draw.randint(0, T)
    first, between = sparse_delta_rule(
        *cut(tokens, 0, middle), initial_state=start, output_final_state=True, update=update
    )
    second, after = sparse_delta_rule(
        *cut(tokens, middle), initial_state=between, output_final_state=True, update=update
    )
    assert torch.equal(torch.cat((first, second), dim=1), y)
    assert torch.equal(after, final)

    state = start.clone()
    assert torch.equal(sparse_delta_rule_(state, *tokens, update=update), y)
    assert torch.equal(state, final)
    state = start.clone()
    steps = [sparse_delta_step_(state, *(x[:, t].contiguous() for x in tokens), update=update) for t in range(T)]
    assert torch.equal(torch.stack(steps, dim=1), y)
    assert torch.equal(state, final)


def test_wide_and_narrow_slabs_agree() -> None:
    """Large tables are cut into narrower slabs than the same tokens on a small one."""
    torch.manual_seed(0)
    N, D, T = 90_000, 48, 20
    tokens = random_tokens(1, T, 1, 8, 8, 60, D, dtype=torch.float32)
    state = torch.randn(1, 1, N, D)
    y, final = sparse_delta_rule(*tokens, initial_state=state, output_final_state=True)
    assert final is not None
    small, small_final = sparse_delta_rule(*tokens, initial_state=state[:, :, :60], output_final_state=True)
    assert torch.equal(y, small)
    assert torch.equal(final[:, :, :60], small_final)
    assert torch.equal(final[:, :, 60:], state[:, :, 60:])
