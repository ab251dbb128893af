"""The dense gated delta rule: every backend against the token loop, and the token loop against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from helpers import cpu_backends, matrix_backends
from sdm.ops import sparse_delta_rule, state_space
from sdm.ops.gated_delta_rule import gated_delta_rule, gated_delta_step_
from sdm.ops.gated_delta_rule.chunked import gated_delta_rule_chunked
from sdm.ops.gated_delta_rule.inputs import Tokens
from sdm.ops.sequences import Call

BACKENDS = matrix_backends("gated_delta_rule")
FAST = BACKENDS[1:]
BOTH_DECAYS = pytest.mark.parametrize("by_channel", [False, True], ids=["per-head", "per-channel"])


def make(
    batch: int,
    time: int,
    heads: int = 2,
    key: int = 5,
    channels: int = 7,
    *,
    strength: float = 0.2,
    by_channel: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Tensor]:
    """query, key, value, beta, log_decay; unit keys."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, keys = (torch.nn.functional.normalize(normal(batch, time, heads, key), dim=-1) for _ in range(2))
    value, beta = normal(batch, time, heads, channels), normal(batch, time, heads).sigmoid()
    log_decay = -strength * normal(batch, time, heads, *([key] if by_channel else [])).abs()
    return [x.to(dtype) for x in (query, keys, value, beta, log_decay)]


def state_like(inputs: list[Tensor], *lead: int, seed: int = 1) -> Tensor:
    shape = (*lead, *inputs[1].shape[2:], inputs[2].shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(inputs[2].dtype)


def error(got: Tensor, want: Tensor) -> float:
    """The largest deviation, relative to the largest entry."""
    if want.numel() == 0:
        assert got.shape == want.shape
        return 0.0
    assert got.shape == want.shape
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))


def run(inputs: list[Tensor], state: Tensor | None, backend: str, cu_seqlens: Tensor | None = None) -> list[Tensor]:
    """Output, final state, and the gradient of every input under random cotangents."""
    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, *([] if state is None else [state]))]
    y, final = gated_delta_rule(
        *leaves[:5],
        initial_state=leaves[5] if state is not None else None,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        backend=backend,
    )
    assert final is not None
    generator = torch.Generator().manual_seed(7)
    loss = sum((x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in (y, final))
    return [y, final, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


def compare(inputs: list[Tensor], state: Tensor | None, backend: str, cu_seqlens: Tensor | None = None) -> None:
    """float32 within 1e-5 of the float64 reference, float64 within 1e-12."""
    wide = [x.double() for x in inputs]
    want = run(wide, None if state is None else state.double(), "reference", cu_seqlens)
    bound = 1e-12 if inputs[2].dtype == torch.float64 else 1e-5
    names = ["y", "final_state", "query", "key", "value", "beta", "log_decay", "initial_state"]
    for name, a, b in zip(names, run(inputs, state, backend, cu_seqlens), want, strict=False):
        assert error(a, b) < bound, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("batch", "time", "heads", "key", "channels"),
    [(1, 1, 1, 1, 1), (2, 3, 2, 5, 7), (1, 64, 1, 8, 8), (2, 65, 3, 6, 40), (1, 130, 2, 12, 33), (2, 17, 1, 64, 128)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@BOTH_DECAYS
def test_matches_the_reference(
    backend: str, batch: int, time: int, heads: int, key: int, channels: int, dtype: torch.dtype, by_channel: bool
) -> None:
    inputs = make(batch, time, heads, key, channels, dtype=dtype, by_channel=by_channel)
    compare(inputs, None, backend)
    compare(inputs, state_like(inputs), backend)
    compare(inputs, state_like(inputs, batch), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strength", [0.0, 1.0, 5.0, 16.0, 50.0])
@BOTH_DECAYS
def test_strong_and_no_decay(backend: str, strength: float, by_channel: bool) -> None:
    inputs = make(2, 70, strength=strength, by_channel=by_channel)
    compare(inputs, state_like(inputs), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@BOTH_DECAYS
def test_a_weak_decay_survives_beside_strong_ones(backend: str, by_channel: bool) -> None:
    inputs = make(1, 200, strength=0.01, by_channel=by_channel)
    inputs[4][:, 10:60] = -50.0
    inputs[4][:, 120] = -50.0
    compare(inputs, state_like(inputs), backend)


@pytest.mark.parametrize("backend", FAST)
@BOTH_DECAYS
def test_no_tokens(backend: str, by_channel: bool) -> None:
    inputs = make(2, 0, by_channel=by_channel)
    state = state_like(inputs)
    y, final = gated_delta_rule(*inputs, initial_state=state, output_final_state=True, backend=backend)
    assert y.shape == (2, 0, 2, 7)
    assert final is not None
    assert torch.equal(final, state.expand(2, -1, -1, -1))
    compare(inputs, state, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bounds", [[0, 70], [0, 1, 1, 33, 70], [0, 0, 64, 70, 70], [0, 5, 6, 70]])
@pytest.mark.parametrize(("integer", "by_channel"), [(torch.int32, False), (torch.int64, False), (torch.int64, True)])
def test_packed_documents(backend: str, bounds: list[int], integer: torch.dtype, by_channel: bool) -> None:
    inputs = make(1, 70, by_channel=by_channel)
    cu_seqlens = torch.tensor(bounds, dtype=integer)
    documents = len(bounds) - 1
    compare(inputs, None, backend, cu_seqlens)
    compare(inputs, state_like(inputs), backend, cu_seqlens)
    state = state_like(inputs, documents)
    compare(inputs, state, backend, cu_seqlens)
    packed = run(inputs, state, backend, cu_seqlens)
    for document in range(documents):
        span = slice(bounds[document], bounds[document + 1])
        alone, final = gated_delta_rule(
            *(x[:, span] for x in inputs),
            initial_state=state[document],
            output_final_state=True,
            backend=backend,
        )
        assert error(packed[0][:, span], alone) < 1e-6
        assert final is not None
        assert error(packed[1][document], final[0]) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@BOTH_DECAYS
def test_whole_equals_pieces_equals_steps(backend: str, by_channel: bool) -> None:
    inputs = make(2, 90, by_channel=by_channel)
    state = state_like(inputs, 2)
    whole, final = gated_delta_rule(*inputs, initial_state=state, output_final_state=True, backend=backend)
    assert final is not None
    pieces, carried = [], state
    for start, end in [(0, 37), (37, 37), (37, 38), (38, 90)]:
        y, after = gated_delta_rule(
            *(x[:, start:end] for x in inputs), initial_state=carried, output_final_state=True, backend=backend
        )
        assert after is not None
        pieces.append(y)
        carried = after
    assert error(torch.cat(pieces, 1), whole) < 1e-5
    assert error(carried, final) < 1e-5
    stepped = state.clone()
    steps = [gated_delta_step_(stepped, *(x[:, t] for x in inputs)) for t in range(90)]
    assert error(torch.stack(steps, 1), whole) < 1e-5
    assert error(stepped, final) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@BOTH_DECAYS
def test_gradcheck(backend: str, by_channel: bool) -> None:
    inputs = make(1, 20 if by_channel else 9, 2, 3, 4, dtype=torch.float64, by_channel=by_channel)
    leaves = [x.requires_grad_() for x in (*inputs, state_like(inputs))]

    def call(*args: Tensor) -> tuple[Tensor, Tensor]:
        *tokens, state = args
        y, final = gated_delta_rule(
            *tokens,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=torch.tensor([0, 2, inputs[0].shape[1]]),
            backend=backend,
        )
        assert final is not None
        return y, final

    assert torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("chunk", [1, 3, 16, 33, 200])
@BOTH_DECAYS
def test_chunk_size_changes_rounding_only(chunk: int, by_channel: bool) -> None:
    tokens = Tokens(*make(2, 50, dtype=torch.float64, by_channel=by_channel))
    state = state_like(list(tokens), 2)
    want = gated_delta_rule(*tokens, initial_state=state, output_final_state=True, backend="reference")
    for a, b in zip(gated_delta_rule_chunked(Call(tokens, state, state.shape[-2]), chunk), want, strict=True):
        assert b is not None
        assert error(a, b) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("peer", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_agrees_with_transformers(backend: str, peer) -> None:  # type: ignore[no-untyped-def]
    query, key, value, beta, log_decay = make(2, 100, 3, 16, 24)
    state = state_like([query, key, value], 2)
    want, want_state = peer(query, key, value, g=log_decay, beta=beta, initial_state=state, output_final_state=True)
    # The peer scales the query by K^-0.5.
    scaled = query * query.shape[-1] ** -0.5
    y, final = gated_delta_rule(
        scaled, key, value, beta, log_decay, initial_state=state, output_final_state=True, backend=backend
    )
    assert final is not None
    assert error(y, want) < 1e-5
    assert error(final, want_state) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_compute_in_float32(backend: str, dtype: torch.dtype) -> None:
    inputs = make(2, 40, dtype=dtype)
    inputs[3], inputs[4] = inputs[3].float(), inputs[4].float()
    got = run(inputs, None, backend)
    want = run([x.double() for x in inputs], None, "reference")
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    assert error(got[1], want[1]) < 1e-5
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 2e-2
    assert [x.dtype for x in got[2:]] == [x.dtype for x in inputs]


@pytest.mark.parametrize("backend", FAST)
def test_views_and_partial_gradients(backend: str) -> None:
    inputs = make(2, 20)
    want, _ = gated_delta_rule(*inputs, backend="reference")
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    views[2] = torch.stack((inputs[2], inputs[2]), -1)[..., 0]
    y, final = gated_delta_rule(*views, backend=backend)
    assert final is None
    assert error(y, want) < 1e-5
    value = inputs[2].clone().requires_grad_()
    y, _ = gated_delta_rule(*inputs[:2], value, *inputs[3:], backend=backend)
    first = torch.autograd.grad(y.sum(), value, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), value)[0])
    with torch.inference_mode():
        assert error(gated_delta_rule(*inputs, backend=backend)[0], want) < 1e-5
    checkpointed = torch.utils.checkpoint.checkpoint(
        lambda v: gated_delta_rule(*inputs[:2], v, *inputs[3:], backend=backend)[0], value, use_reentrant=False
    )
    assert error(torch.autograd.grad(checkpointed.sum(), value)[0], first) < 1e-6


@pytest.mark.skipif("native" not in cpu_backends("gated_delta_rule"), reason="the compiled core is missing")
@pytest.mark.parametrize("channels", [24, 150])
@BOTH_DECAYS
def test_threads_change_nothing(channels: int, by_channel: bool) -> None:
    inputs = make(2, 400, 3, 16, channels, by_channel=by_channel)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(inputs, state_like(inputs), "native"))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", FAST)
@BOTH_DECAYS
def test_compiles_to_one_graph(backend: str, by_channel: bool) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(*args: Tensor) -> tuple[Tensor, Tensor]:
        y, final = gated_delta_rule(*args, output_final_state=True, backend=backend)
        assert final is not None
        return y, final

    leaves = [x.requires_grad_() for x in make(2, 20, by_channel=by_channel)]
    want = gated_delta_rule(*leaves, output_final_state=True, backend="reference")
    got = call(*leaves)
    for a, b in zip(got, want, strict=True):
        assert b is not None
        assert error(a, b) < 1e-5
    wanted = torch.autograd.grad(want[0].square().sum(), leaves)
    for a, b in zip(torch.autograd.grad(got[0].square().sum(), leaves), wanted, strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_step_updates_in_place(dtype: torch.dtype) -> None:
    inputs = [x[:, 0] for x in make(2, 1)]
    state = state_like(make(2, 1), 2).to(dtype)
    want = gated_delta_rule(
        *(x.unsqueeze(1) for x in inputs), initial_state=state, output_final_state=True, backend="reference"
    )
    changed = state.clone()
    y = gated_delta_step_(changed, *inputs)
    assert y.dtype == torch.float32
    assert want[1] is not None
    assert error(y, want[0][:, 0]) < 1e-6
    assert error(changed, want[1]) < (4e-3 if dtype == torch.bfloat16 else 1e-6)
    strided = torch.stack((state, state), -1)[..., 0]
    gated_delta_step_(strided, *inputs)
    assert error(strided, changed) < (4e-3 if dtype == torch.bfloat16 else 1e-6)
    with pytest.raises(RuntimeError, match=r"gated_delta_step_ .*no gradients"):
        gated_delta_step_(changed, inputs[0].clone().requires_grad_(), *inputs[1:])
    with pytest.raises(ValueError, match=r"state must be \[B,H,K,D\], here \(2, 2, 5, 7\), got shape"):
        gated_delta_step_(changed.transpose(-1, -2), *inputs)
    with pytest.raises(ValueError, match="log_decay must be at most 0"):
        gated_delta_step_(changed, *inputs[:4], inputs[4] + 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_values(backend: str) -> None:
    inputs = make(1, 12)
    for bad in (0.5, float("nan")):
        log_decay = inputs[4].clone()
        log_decay[0, 7, 1] = bad
        with pytest.raises(ValueError, match=rf"log_decay must be at most 0 .*got {bad}"):
            gated_delta_rule(*inputs[:4], log_decay, backend=backend)
    for bounds, message in [
        ([0, 7], "cu_seqlens must start at 0 and end at T = 12, got 0 and 7"),
        ([1, 12], "cu_seqlens must start at 0"),
        ([0, 8, 5, 12], "cu_seqlens must not decrease, got 8 then 5"),
    ]:
        with pytest.raises(ValueError, match=message):
            gated_delta_rule(*inputs, cu_seqlens=torch.tensor(bounds), backend=backend)


def test_bad_shapes() -> None:
    query, key, value, beta, log_decay = make(2, 4)
    good = {"query": query, "key": key, "value": value, "beta": beta, "log_decay": log_decay}
    for change, kind, message in [
        (
            {"query": query[..., :4]},
            ValueError,
            r"key must be the shape of query, here \(2, 4, 2, 4\), got shape \[2, 4, 2, 5\]",
        ),
        (
            {"key": key[:, :3]},
            ValueError,
            r"key must be the shape of query, here \(2, 4, 2, 5\), got shape \[2, 3, 2, 5\]",
        ),
        ({"value": value[0]}, ValueError, r"value must be \[B,T,H,D\], got shape \[4, 2, 7\]"),
        ({"value": value[..., :0]}, ValueError, "value must have at least one channel"),
        ({"beta": beta[..., None]}, ValueError, r"beta must be \[B,T,H\], here \(2, 4, 2\), got shape \[2, 4, 2, 1\]"),
        (
            {"log_decay": log_decay[:1]},
            ValueError,
            r"log_decay must be \[B,T,H\], or \[B,T,H,K\] .*here \(2, 4, 2\)",
        ),
        ({"log_decay": -value.abs()}, ValueError, r"got shape \[2, 4, 2, 7\]"),
        ({"value": value.long()}, TypeError, r"value must be a floating-point tensor, got torch\.int64"),
        ({"beta": 0.5}, TypeError, "beta must be a torch.Tensor, got float"),
        ({"key": key.to("meta")}, ValueError, "key is on meta, but value is on cpu"),
        ({"initial_state": torch.zeros(3, 2, 5, 7)}, ValueError, r"initial_state must be \[H,K,D\] = \[2, 5, 7\]"),
        ({"initial_state": torch.zeros(2, 7, 5)}, ValueError, r"initial_state .*got shape \[2, 7, 5\]"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "cu_seqlens packs documents into one row.*got 2"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, TypeError, "cu_seqlens must be an integer tensor"),
        ({"cu_seqlens": [0, 4]}, TypeError, "cu_seqlens must be a torch.Tensor, got list"),
        ({"cu_seqlens": torch.tensor([0])}, ValueError, r"cu_seqlens must be \[documents \+ 1\] offsets"),
        ({"backend": "fast"}, ValueError, "backend must be one of .*got 'fast'"),
    ]:
        with pytest.raises(kind, match=message):
            gated_delta_rule(**{**good, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_decays_of_all_channels_are_a_decay_per_head(backend: str) -> None:
    """Kimi Delta Attention with equal decays is Gated DeltaNet, and without decay DeltaNet."""
    inputs = make(2, 90)
    for log_decay in (inputs[4], torch.zeros_like(inputs[4])):
        want = run([*inputs[:4], log_decay], state_like(inputs), backend)
        got = run([*inputs[:4], log_decay.unsqueeze(-1).expand_as(inputs[1])], state_like(inputs), backend)
        got[6] = got[6].sum(-1)
        assert all(error(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_a_sparse_delta_rule_that_writes_and_reads_every_slot(backend: str) -> None:
    query, key, value, beta, log_decay = inputs = make(2, 70, by_channel=True)
    slots = torch.arange(key.shape[-1]).expand_as(key)
    state = state_like(inputs, 2)
    tokens = (slots, key, value, beta, log_decay, slots, query)
    want = sparse_delta_rule(*tokens, initial_state=state, output_final_state=True, backend="reference")
    got = gated_delta_rule(*inputs, initial_state=state, output_final_state=True, backend=backend)
    for a, b in zip(got, want, strict=True):
        assert a is not None
        assert b is not None
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_a_decay_per_channel_is_in_place(backend: str, dtype: torch.dtype) -> None:
    inputs = make(2, 1, by_channel=True)
    state = state_like(inputs, 2).to(dtype)
    want = gated_delta_rule(*inputs, initial_state=state, output_final_state=True, backend="reference")
    y = gated_delta_step_(state, *(x[:, 0] for x in inputs), backend=backend)
    assert want[1] is not None
    assert error(y, want[0][:, 0]) < 1e-6
    assert error(state, want[1]) < (4e-3 if dtype == torch.bfloat16 else 1e-6)
    with pytest.raises(ValueError, match=r"log_decay must be \[B,H\], or \[B,H,K\]"):
        gated_delta_step_(state, *(x[:, 0] for x in inputs[:4]), inputs[4][:, 0, :, :3])
    with pytest.raises(ValueError, match="log_decay must be at most 0"):
        gated_delta_step_(state, *(x[:, 0] for x in inputs[:4]), inputs[4][:, 0] + 3, backend=backend)


def test_the_state_space_takes_a_decay_per_head() -> None:
    with pytest.raises(ValueError, match=r"log_decay must be \[B,T,H\], here \(2, 4, 2\), got shape \[2, 4, 2, 5\]"):
        state_space(*make(2, 4, by_channel=True))


@pytest.mark.parametrize("backend", FAST)
def test_channels_that_do_not_meet_an_infinity_stay_finite(backend: str) -> None:
    """-inf forgets a channel: the others keep what they hold, in backward too."""
    inputs = make(1, 40, by_channel=True, dtype=torch.float64)
    inputs[4][:, 20, :, 1] = -torch.inf
    want, got = (run(inputs, state_like(inputs), name) for name in ("reference", backend))
    assert got[0].isfinite().all()
    assert all(error(a, b) < 1e-12 for a, b in zip(got[:2], want[:2], strict=True))
