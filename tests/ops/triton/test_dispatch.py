"""Which calls the Triton backends get, on devices that are not here: fake tensors stand in for them."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sdm import ops
from sdm.ops import backends
from sdm.ops.backends import BACKENDS
from sdm.ops.product_key.inputs import Call
from sdm.ops.triton.launch import record

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")


@pytest.fixture(autouse=True)
def _own_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test may change the lists, and hears what was said before."""
    monkeypatch.setattr(backends, "_said", set())
    for op, listed in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, op, list(listed))


def topk(device: str, dtype: torch.dtype = torch.float32, backend: str = "auto") -> tuple[Tensor, Tensor]:
    return ops.product_key_topk(torch.zeros(5, 40, device=device, dtype=dtype), 7, backend=backend)


def change(op: str, name: str, **fields: Any) -> None:
    """Give the backend of this name other fields."""
    BACKENDS[op] = [dataclasses.replace(x, **fields) if x.name == name else x for x in BACKENDS[op]]


def serves(name: str) -> list[Call]:
    """The calls that this backend gets instead of serving them: nothing computes on a device that is not here."""
    calls: list[Call] = []
    change("product_key_topk", name, run=lambda call: (calls.append(call), (call.scores, call.scores))[1])
    return calls


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_takes_it_on_gpus(device: str, dtype: torch.dtype) -> None:
    with FakeTensorMode(), record() as launches, warnings.catch_warnings():
        warnings.simplefilter("error")
        values, index = topk(device, dtype)
    assert [x.name for x in launches] == ["rank_halves_kernel", "select_kernel"]
    assert values.device.type == index.device.type == torch.device(device).type
    assert (values.dtype, index.dtype) == (torch.float32, torch.int64)
    assert launches[0].arguments["scores_ptr"].dtype == dtype


def test_auto_never_interprets() -> None:
    with record() as launches:
        topk("cpu")
    assert not launches


@pytest.mark.parametrize("because", ["Triton is not installed (pip install 'triton>=3.4')", "Triton 2.1.0 is too old"])
def test_without_it_gpus_get_chunked_and_are_told_once(because: str) -> None:
    change("product_key_topk", "triton", missing=because)
    calls = serves("chunked")
    with FakeTensorMode(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        topk("cuda")
        topk("cuda")
        topk("cpu")
    assert [str(call.device) for call in calls] == ["cuda:0", "cuda:0"]
    (warning,) = said
    assert str(warning.message) == f'backend "chunked", slower than "triton", serves this call: {because}'
    assert warning.filename == __file__
    with FakeTensorMode(), pytest.raises(ValueError, match=r'"triton" cannot .*: Triton .*; use "auto" or "chunked"'):
        topk("cuda", backend="triton")


def test_gpus_without_flash_linear_attention_are_told() -> None:
    """Whoever compares with the gated delta rule must know which of its kernels ran."""
    change("gated_delta_rule", "fla", missing="flash-linear-attention is not installed")
    change("gated_delta_rule", "triton", run=lambda call: (call.tokens.value, None))
    with FakeTensorMode():
        wide, gate = (torch.zeros(1, 3, 2, *rest, device="cuda") for rest in ((4,), ()))
        message = 'backend "triton", slower than "fla".*flash-linear-attention is not installed'
        with pytest.warns(RuntimeWarning, match=message):
            ops.gated_delta_rule(wide, wide, wide, gate, gate)


def test_what_it_refuses_is_said() -> None:
    calls = serves("chunked")
    with FakeTensorMode(), pytest.warns(RuntimeWarning, match=r'"triton", serves this call: .*, got torch\.float64'):
        topk("cuda", torch.float64)
    assert len(calls) == 1


def test_a_cpu_call_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdm.ops.triton.backend.interpreting", lambda: False)
    message = (
        r"works on cuda and xpu tensors, got cpu; .* start Python with TRITON_INTERPRET=1; use \"auto\" or \"native\""
    )
    with pytest.raises(ValueError, match=message):
        topk("cpu", backend="triton")
