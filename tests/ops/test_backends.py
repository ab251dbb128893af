"""Backends describe themselves: who serves a call, who refuses it and why, and how one is added."""

from __future__ import annotations

import dataclasses
import sys
import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_close, assert_identical, random_tokens
from sdm import ops
from sdm.layers import GatedDeltaNet, Mamba2, SparseDeltaMemory
from sdm.ops import backends
from sdm.ops.backends import BACKENDS, Backend
from sdm.ops.gated_delta_rule.fla import FLA

needs_core = pytest.mark.skipif("native" not in ops.available_backends(), reason="the compiled core is missing")


@pytest.fixture(autouse=True)
def _own_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test may change the lists, and hears what was said before."""
    monkeypatch.setattr(backends, "_said", set())
    for op, listed in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, op, list(listed))


def dense_tokens(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    query, key, value = (torch.randn(*shape, size, dtype=dtype) for size in (4, 4, 6))
    return [query, key, value, torch.rand(shape, dtype=dtype), -torch.rand(shape, dtype=dtype)]


LAYERS = {"sparse_delta_rule": SparseDeltaMemory, "gated_delta_rule": GatedDeltaNet, "state_space": Mamba2}


def layer_of(op: str, backend: str) -> Any:
    sizes = {"num_slots": 16, "num_writes": 2, "num_reads": 2} if op == "sparse_delta_rule" else {}
    return LAYERS[op](16, 2, **sizes, backend=backend)


@pytest.mark.parametrize("op", LAYERS)
def test_a_backend_is_added_in_one_line(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    plain = BACKENDS[op][-1]
    BACKENDS[op].insert(0, Backend("quick", lambda call: (served.append(call), plain.run(call))[1], plain.step_))
    if op == "sparse_delta_rule":
        BACKENDS["product_key_topk"].insert(0, dataclasses.replace(BACKENDS["product_key_topk"][-1], name="quick"))
    assert ops.backends.available_backends(op)[-1] == "quick"
    x = torch.randn(2, 5, 16)
    for backend in ("auto", "quick"):
        torch.manual_seed(0)
        layer = layer_of(op, backend)
        y, state = layer(x, return_state=True)
        torch.manual_seed(0)
        expected, expected_state = layer_of(op, "reference")(x, return_state=True)
        assert_identical([y], [expected])
        assert_identical([layer.step_(x[:, 0], state)], [layer.step_(x[:, 0], expected_state)])
    assert len(served) == 2


@pytest.mark.parametrize(("op", "backend"), [(op, backend.name) for op in LAYERS for backend in BACKENDS[op]])
def test_steps_go_to_the_backend_of_their_layer(op: str, backend: str) -> None:
    if backend not in ops.backends.available_backends(op):
        pytest.skip("not on this machine")
    served = []

    def spy(listed: Backend) -> Backend:
        return dataclasses.replace(listed, step_=lambda call: (served.append(listed.name), listed.step_(call))[1])

    BACKENDS[op] = [spy(listed) for listed in BACKENDS[op]]
    layer = layer_of(op, backend)
    layer.step_(torch.randn(2, 16), layer.start_state(2))
    assert served == [backend]


@needs_core
def test_the_short_way_of_a_usual_step_is_the_cores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    short_way = sys.modules["sdm.ops.sparse_delta_rule"].take_usual_step_
    monkeypatch.setattr(
        sys.modules["sdm.ops.sparse_delta_rule"],
        "take_usual_step_",
        lambda *arguments: (taken.append(1), short_way(*arguments))[1],
    )
    token = [x[:, 0] for x in random_tokens(2, 1, 1, dtype=torch.float32)]
    for backend, expected in (("auto", 1), ("native", 2), ("chunked", 2), ("reference", 2)):
        ops.sparse_delta_step_(torch.zeros(2, 1, 9, 5), *token, backend=backend)
        assert len(taken) == expected, backend


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of \('auto', 'chunked', 'reference'\) .* got 'native'"):
        ops.state_space_step_(torch.zeros(2, 1, 4, 6), *dense_tokens(2, 1), backend="native")
    with pytest.raises(ValueError, match="for sparse_delta_rule and product_key_topk, got 'fla'"):
        SparseDeltaMemory(16, backend="fla")


@needs_core
def test_a_backend_that_is_named_serves_or_says_why_not() -> None:
    token = [x[:, 0] for x in random_tokens(2, 1, 1, dtype=torch.float32)]
    with pytest.raises(ValueError, match=r'"native" cannot .*float16 .*; use "auto" or "chunked" or "reference"'):
        ops.sparse_delta_step_(torch.zeros(2, 1, 9, 5, dtype=torch.float16), *token, backend="native")
    meta = [x.to("meta") for x in dense_tokens(1, 3, 1)]
    with pytest.raises(ValueError, match="it works on cpu tensors, got meta"):
        ops.gated_delta_rule(*meta, backend="native")


@needs_core
def test_a_slow_choice_is_said_once_to_whoever_called() -> None:
    token = [x[:, 0] for x in random_tokens(2, 1, 1, dtype=torch.float32)]
    state = torch.zeros(2, 1, 9, 5, dtype=torch.float16)
    with pytest.warns(RuntimeWarning, match='"chunked", slower than "native", .*float16') as said:
        ops.sparse_delta_step_(state, *token)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.sparse_delta_step_(state, *token)
        ops.product_key_topk(torch.zeros(4, 8, device="meta"), 3)  # nothing is faster there


def test_what_is_missing_is_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_tokens(1, 5, 1)
    expected = ops.sparse_delta_rule(*tokens, num_slots=9, backend="reference")[0]
    monkeypatch.setattr(BACKENDS["sparse_delta_rule"][0], "missing", "no compiler was found")
    assert "native" not in ops.available_backends()
    assert_close([ops.sparse_delta_rule(*tokens, num_slots=9)[0]], [expected], 1e-12)
    token, state = [x[:, 0].float() if x.is_floating_point() else x[:, 0] for x in tokens], torch.zeros(1, 1, 9, 5)
    assert_close([ops.sparse_delta_step_(state, *token)], [expected[:, 0]], 1e-6)
    with pytest.raises(ValueError, match="no compiler was found"):
        ops.sparse_delta_step_(state, *token, backend="native")


def test_nobody_can(monkeypatch: pytest.MonkeyPatch) -> None:
    BACKENDS["state_space"] = [Backend("cuda only", lambda call: None, device="cuda")]
    with pytest.raises(ValueError, match="no backend of state_space can serve this call"):
        ops.state_space(*dense_tokens(1, 3, 1))


@pytest.mark.parametrize("backend", ops.backends.available_backends("gated_delta_rule"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_state_takes_a_dense_step(backend: str, dtype: torch.dtype) -> None:
    """Also one in 16 bits, and one that is not contiguous."""
    if backend == "fla":
        pytest.skip("needs a GPU")
    token = dense_tokens(2, 3)
    state = torch.randn(2, 4, 3, 6).to(dtype).transpose(1, 2)
    expected_state = state.float().contiguous()
    expected = ops.gated_delta_step_(expected_state, *token, backend="reference")
    assert_close([ops.gated_delta_step_(state, *token, backend=backend)], [expected], 1e-6)
    assert_close([state], [expected_state], 1e-6 if dtype == torch.float32 else 1e-2)


def test_forward_mode_of_the_dense_rule(recwarn: pytest.WarningsRecorder) -> None:
    tokens = dense_tokens(1, 70, 1, dtype=torch.float64)

    def run(value: Tensor, backend: str) -> Tensor:
        return ops.gated_delta_rule(*tokens[:2], value, *tokens[3:], backend=backend)[0]

    for backend in ("auto", "reference"):
        y, tangent = torch.func.jvp(lambda v, b=backend: run(v, b), (tokens[2],), (tokens[2],))
        assert_close([tangent], [y], 1e-12)  # an empty memory is linear in the values


def test_the_kernel_of_flash_linear_attention_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the kernel, which needs a GPU: argument names, dtypes and the shape of the state."""

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, initial_state: Any, **options: Any) -> Any:
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert initial_state.shape == (2, 2, 4, 8)
        assert set(options) == {"output_final_state", "cu_seqlens"}
        state = {"initial_state": initial_state, "backend": "reference"}
        return ops.gated_delta_rule(q * scale, k, v, beta, g, **state, **options)

    module = types.SimpleNamespace(chunk_gated_delta_rule=kernel)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)  # type: ignore[arg-type]
    BACKENDS["gated_delta_rule"] = [
        dataclasses.replace(x, missing="", device="cpu") if x is FLA else x for x in BACKENDS["gated_delta_rule"]
    ]
    layer = GatedDeltaNet(16, 2, learned_initial_state=True).bfloat16()
    for options in ({}, {"cu_seqlens": torch.tensor([0, 4, 9])}):
        x = torch.randn(1 if options else 2, 9, 16, dtype=torch.bfloat16)
        layer.backend = "reference"
        expected, final = layer(x, return_state=True, **options)
        layer.backend = "fla"
        y, state = layer(x, return_state=True, **options)
        assert_close([y, state.memory], [expected, final.memory], 0.05)
    with pytest.raises(ValueError, match=r'"fla" cannot .* takes values of bfloat16 or float16, got torch\.float32'):
        ops.gated_delta_rule(*dense_tokens(1, 3, 1), backend="fla")


def test_flash_linear_attention_is_missing_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    if not FLA.missing:
        pytest.skip("flash-linear-attention is installed")
    with pytest.raises(ValueError, match=r"flash-linear-attention is not installed \(pip install"):
        ops.gated_delta_rule(*dense_tokens(1, 3, 1), backend="fla")


def test_export_to_onnx_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other backends are made of operations that ONNX does not have."""
    monkeypatch.setattr("sdm.ops.backends.exports_onnx", lambda: True)
    scores = torch.randn(3, 8)
    with pytest.raises(ValueError, match=r'"chunked" cannot serve this call: ONNX .* use "auto" or "reference"'):
        ops.product_key_topk(scores, 2, backend="chunked")
    with pytest.warns(RuntimeWarning, match='"reference", slower than'):
        actual = ops.product_key_topk(scores, 2)
    expected = ops.product_key_topk(scores, 2, backend="reference")
    assert all(x.equal(y) for x, y in zip(actual, expected, strict=True))
