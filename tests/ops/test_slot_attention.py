"""Slot attention: both backends against a float64 loop written from the equations, and its special cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import cpu_backends
from sdm.ops import slot_attention, slot_attention_step_, sparse_delta_rule
from sdm.ops.sequences import Call, ChannelDecay
from sdm.ops.slot_attention.chunked import slot_attention_chunked
from sdm.ops.slot_attention.inputs import Tokens

BACKENDS = cpu_backends("slot_attention")


def make(
    batch: int,
    time: int,
    heads: int = 2,
    key: int = 3,
    channels: int = 5,
    slots: int = 6,
    *,
    strength: float = 1.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Tensor]:
    """query, key, value, log_decay; half of the slots are left out of each write."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, keys, value = (normal(batch, time, heads, size) for size in (key, key, channels))
    routed = torch.rand((batch, time, heads, slots), generator=generator) < 0.5
    log_decay = -strength * normal(batch, time, heads, slots).abs() * routed
    return [x.to(dtype) for x in (query, keys, value, log_decay)]


def state_like(inputs: list[Tensor], *lead: int) -> Tensor:
    query, _, value, log_decay = inputs
    shape = (*lead, value.shape[2], log_decay.shape[-1], query.shape[-1] + value.shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(value.dtype)


def loop(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The equations with lists of numbers, one slot at a time."""
    query, key, value, log_decay = (x.double() for x in inputs)
    state, size = state.double().clone(), query.shape[-1]
    y = torch.zeros_like(value)
    for b in range(value.shape[0]):
        for h in range(value.shape[2]):
            for t in range(value.shape[1]):
                written = torch.cat((key[b, t, h], value[b, t, h]))
                scores = []
                for i in range(log_decay.shape[-1]):
                    kept = math.exp(log_decay[b, t, h, i])
                    state[b, h, i] = kept * state[b, h, i] + (1 - kept) * written
                    scores.append(float(state[b, h, i, :size] @ query[b, t, h]))
                total = sum(math.exp(score) for score in scores)
                for i, score in enumerate(scores):
                    y[b, t, h] += math.exp(score) / total * state[b, h, i, size:]
    return y, state


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    if not expected.numel():
        return 0.0
    difference = (actual.detach().double() - expected.detach().double()).abs().max()
    return float(difference / expected.detach().double().abs().max().clamp(min=1e-30))


def run(inputs: list[Tensor], state: Tensor, backend: str, cu_seqlens: Tensor | None = None) -> list[Tensor]:
    """Output, final state and gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, state)]
    y, final = slot_attention(
        *leaves[:4], initial_state=leaves[4], output_final_state=True, cu_seqlens=cu_seqlens, backend=backend
    )
    assert final is not None
    generator = torch.Generator().manual_seed(7)
    loss = sum((x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in (y, final))
    return [y, final, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("time", "strength"), [(1, 1.0), (17, 0.1), (70, 1.0), (70, 5.0), (40, 50.0)])
def test_it_follows_the_equations(backend: str, time: int, strength: float) -> None:
    inputs = make(2, time, strength=strength)
    state = state_like(inputs, 2)
    y, final = slot_attention(*inputs, initial_state=state, output_final_state=True, backend=backend)
    expected, expected_state = loop(inputs, state)
    assert final is not None
    assert error(y, expected) < 1e-5
    assert error(final, expected_state) < 1e-5
    wide = run([x.double() for x in inputs], state.double(), "reference")
    assert all(error(a, b) < 1e-5 for a, b in zip(run(inputs, state, backend), wide, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: str) -> None:
    inputs = make(1, 19, 1, 2, 3, 4, dtype=torch.float64)
    inputs[3] -= 0.1  # a slot that is left out has no gradient on the other side of zero
    leaves = [x.requires_grad_() for x in (*inputs, state_like(inputs))]

    def call(*args: Tensor) -> Any:
        return slot_attention(
            *args[:4],
            initial_state=args[4],
            output_final_state=True,
            cu_seqlens=torch.tensor([0, 2, 19]),
            backend=backend,
        )

    assert torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_equals_pieces_equals_steps_equals_packed(backend: str) -> None:
    inputs = make(2, 90)
    state = state_like(inputs, 2)
    whole, final = slot_attention(*inputs, initial_state=state, output_final_state=True, backend=backend)
    assert final is not None
    pieces, carried = [], state
    for start, end in [(0, 37), (37, 37), (37, 38), (38, 90)]:
        y, after = slot_attention(
            *(x[:, start:end] for x in inputs), initial_state=carried, output_final_state=True, backend=backend
        )
        assert after is not None
        pieces.append(y)
        carried = after
    assert error(torch.cat(pieces, 1), whole) < 1e-5
    assert error(carried, final) < 1e-5
    stepped = state.clone()
    steps = [slot_attention_step_(stepped, *(x[:, t] for x in inputs), backend=backend) for t in range(90)]
    assert error(torch.stack(steps, 1), whole) < 1e-5
    assert error(stepped, final) < 1e-5
    packed, finals = slot_attention(
        *(x.flatten(0, 1).unsqueeze(0) for x in inputs),
        initial_state=state,
        output_final_state=True,
        cu_seqlens=torch.tensor([0, 90, 180]),
        backend=backend,
    )
    assert finals is not None
    assert error(packed.view_as(whole), whole) < 1e-5
    assert error(finals, final) < 1e-5


def test_writes_are_those_of_the_sparse_delta_rule_by_slot() -> None:
    """update="slot" with beta 1, no decay and the write weight 1 - exp(f)."""
    _, key, value, log_decay = inputs = make(2, 40, dtype=torch.float64)
    state = state_like(inputs, 2)
    slots = torch.arange(log_decay.shape[-1]).expand_as(log_decay)
    ones = value.new_ones(value.shape[:-1])
    written = torch.cat((key, value), dim=-1)
    _, expected = sparse_delta_rule(
        *(slots, -torch.expm1(log_decay), written, ones, 0 * ones, slots, log_decay),
        initial_state=state,
        output_final_state=True,
        update="slot",
    )
    _, final = slot_attention(*inputs, initial_state=state, output_final_state=True)
    assert final is not None
    assert expected is not None
    assert error(final, expected) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_round_robin_router_that_overwrites_is_window_attention(backend: str) -> None:
    query, key, value, log_decay = make(2, 50)
    slots = log_decay.shape[-1]
    turn = torch.arange(50).view(1, -1, 1, 1) % slots == torch.arange(slots)
    log_decay = torch.where(turn, -torch.inf, torch.zeros(())).expand_as(log_decay).contiguous()
    y, _ = slot_attention(query, key, value, log_decay, backend=backend)
    scores = torch.einsum("bthk,bshk->bhts", query, key)
    distance = torch.arange(50).unsqueeze(-1) - torch.arange(50)
    visible = (distance >= 0) & (distance < slots)
    expected = torch.einsum("bhts,bshd->bthd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)
    assert error(y[:, slots - 1 :], expected[:, slots - 1 :]) < 1e-5  # before, empty slots are read as well


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_that_are_left_out_keep_every_bit(backend: str) -> None:
    inputs = make(2, 70)
    inputs[3][..., [1, 4]] = 0
    state = state_like(inputs, 2)
    _, final = slot_attention(*inputs, initial_state=state, output_final_state=True, backend=backend)
    assert final is not None
    assert torch.equal(final[:, :, [1, 4]], state[:, :, [1, 4]])
    slot_attention_step_(stepped := state.clone(), *(x[:, 0] for x in inputs), backend=backend)
    assert torch.equal(stepped[:, :, [1, 4]], state[:, :, [1, 4]])


def test_a_weak_write_is_not_rounded_away() -> None:
    """1 - exp(f) is zero for small f unless it is computed as expm1."""
    inputs = make(1, 3)
    inputs[3] = torch.full_like(inputs[3], -1e-9)
    _, final = slot_attention(*inputs, output_final_state=True)
    expected = 1e-9 * torch.cat((inputs[1], inputs[2]), dim=-1).double().sum(1)
    assert final is not None
    assert error(final[:, :, 0], expected) < 1e-5


@pytest.mark.parametrize("chunk", [1, 3, 16, 33, 200])
def test_chunk_size_changes_rounding_only(chunk: int) -> None:
    inputs = make(2, 50, dtype=torch.float64)
    state = state_like(inputs, 2)
    want = slot_attention(*inputs, initial_state=state, output_final_state=True, backend="reference")
    for a, b in zip(slot_attention_chunked(Call(Tokens(*inputs), state, 6), chunk), want, strict=True):
        assert b is not None
        assert error(a, b) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_change_nothing(backend: str) -> None:
    inputs = make(2, 300, 4, 16, 64, 32)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(inputs, state_like(inputs, 2), backend))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_and_no_tokens(backend: str) -> None:
    inputs = make(2, 30, dtype=torch.bfloat16)
    inputs[3] = inputs[3].float()
    y, final = slot_attention(*inputs, output_final_state=True, backend=backend)
    want, _ = slot_attention(*(x.double() for x in inputs), backend="reference")
    assert y.dtype == torch.bfloat16
    assert final is not None
    assert final.dtype == torch.float32
    assert error(y, want) < 2e-2
    state = state_like(inputs, 2).float()
    y, final = slot_attention(*(x[:, :0] for x in inputs), initial_state=state, output_final_state=True)
    assert y.shape == (2, 0, 2, 5)
    assert final is not None
    assert torch.equal(final, state)


def test_decays_within_a_chunk() -> None:
    """Against all pairs and channels written out."""
    generator = torch.Generator().manual_seed(0)
    for time in (1, 5, 16, 40):
        log_decay = -torch.rand((2, time, 3), generator=generator, dtype=torch.float64)
        left, right = torch.randn((2, 2, time, 3), generator=generator, dtype=torch.float64)
        pairs = torch.randn((2, time, time), generator=generator, dtype=torch.float64)
        total = log_decay.cumsum(-2)
        weight = (total.unsqueeze(-2) - total.unsqueeze(-3)).exp() * torch.ones(time, time).tril().unsqueeze(-1)
        decay = ChannelDecay(log_decay)
        assert error(decay.pairs(left, right), torch.einsum("bti,bsi,btsi->bts", left, right, weight)) < 1e-12
        assert error(decay.sums(pairs, right), torch.einsum("bts,bsi,btsi->bti", pairs, right, weight)) < 1e-12
        assert error(decay.to_end, weight[:, -1]) < 1e-12


def test_bad_inputs() -> None:
    query, key, value, log_decay = make(2, 4)
    good: dict[str, Any] = {"query": query, "key": key, "value": value, "log_decay": log_decay}
    for change, kind, message in [
        ({"key": key[..., :2]}, ValueError, r"key must be the shape of query, here \(2, 4, 2, 3\)"),
        ({"value": value[0]}, ValueError, r"value must be \[B,T,H,D\], got shape \[4, 2, 5\]"),
        ({"log_decay": log_decay[:, :3]}, ValueError, r"log_decay must be \[B,T,H,M\]"),
        ({"log_decay": log_decay[..., :0]}, ValueError, "log_decay must not be empty in its last dimension"),
        ({"log_decay": log_decay + 99}, ValueError, "log_decay must be at most 0"),
        ({"value": value.long()}, TypeError, r"value must be a floating-point tensor, got torch\.int64"),
        ({"initial_state": torch.zeros(3, 2, 6, 8)}, ValueError, r"initial_state must be \[H,M,K\+D\] = \[2, 6, 8\]"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "cu_seqlens packs documents into one row"),
        ({"backend": "native"}, ValueError, "backend must be one of .*got 'native'"),
    ]:
        with pytest.raises(kind, match=message):
            slot_attention(**{**good, **change})
    token = [x[:, 0] for x in (query, key, value, log_decay)]
    with pytest.raises(ValueError, match=r"state must be \[B,H,M,K\+D\], here \(2, 2, 6, 8\), got shape"):
        slot_attention_step_(torch.zeros(2, 2, 6, 5), *token)
    with pytest.raises(RuntimeError, match=r"slot_attention_step_ .*no gradients"):
        slot_attention_step_(torch.zeros(2, 2, 6, 8), token[0].requires_grad_(), *token[1:])
