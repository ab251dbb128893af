"""What the Triton backends share: being there or not, launching, recording and counting."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sdm.ops.backends import Call
from sdm.ops.triton.availability import MINIMUM
from sdm.ops.triton.backend import TritonBackend, interpreting, missing_because
from sdm.ops.triton.launch import LARGEST_GRID, Pointer, launch, record

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
tl = triton.language


@triton.jit
def add_kernel(x_ptr, y_ptr, size, scale: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + at, mask=inside)
    first = tl.load(x_ptr)
    tl.store(y_ptr + at, x + first * scale, mask=inside)


def add(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    launch(add_kernel, (-(-x.numel() // 16),), x, y, x.numel(), scale=2, BLOCK=16, num_warps=2)
    return y


def call_on(device: str) -> Call:
    call = Call()
    call.device, call.dtype = torch.device(device), torch.float32
    return call


def test_versions() -> None:
    assert missing_because("") == "Triton is not installed (pip install 'triton>=3.4'; torch for GPUs brings it)"
    assert "Triton 3.3.1 is too old, 3.4 or newer is needed" in missing_because("3.3.1")
    assert "of unknown version is too old" in missing_because("of unknown version")
    for good in ("3.4.0", "3.7.1+git123", "3.10", "4.0.0a1"):
        assert not missing_because(good)
    assert not missing_because(triton.__version__), f"the tests need Triton {MINIMUM}"


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1 (set by the tests where there is no GPU)")
def test_launch_runs_records_and_skips_what_is_empty() -> None:
    x = torch.arange(37.0)
    with record() as launches:
        y = add(x)
    assert torch.equal(y, x)
    assert add(torch.ones(5)).tolist() == [3.0] * 5
    (seen,) = launches
    assert (seen.name, seen.grid, seen.options) == ("add_kernel", (3,), {"num_warps": 2})
    aligned = Pointer(torch.float32, True)
    assert seen.arguments == {"x_ptr": aligned, "y_ptr": aligned, "size": 37, "scale": 2, "BLOCK": 16}
    with record() as launches:
        assert add(torch.zeros(0)).shape == (0,)
    assert not launches


def test_without_memory_nothing_runs() -> None:
    huge = torch.empty(2**33, device="meta", dtype=torch.bfloat16)
    with record() as launches:
        assert add(huge).shape == huge.shape
        add(huge[3:])
        with FakeTensorMode():
            add(torch.empty(7))
    assert [seen.grid for seen in launches] == [(2**29,), (2**29,), (1,)]
    assert launches[0].arguments["size"] == 2**33
    assert launches[0].arguments["x_ptr"] == Pointer(torch.bfloat16, True, near=False)
    assert launches[1].arguments["x_ptr"] == Pointer(torch.bfloat16, False, near=False)


def test_a_grid_that_no_gpu_takes() -> None:
    x = torch.empty(1, device="meta")
    with pytest.raises(ValueError, match=r"the grid of add_kernel is \(1, 65536\), but a GPU takes at most"):
        launch(add_kernel, (1, LARGEST_GRID[1] + 1), x, x, 1, scale=1, BLOCK=16)


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1 (set by the tests where there is no GPU)")
def test_traffic() -> None:
    from sdm.ops.triton.interpreter import count_traffic

    x = torch.zeros(29)
    with count_traffic() as traffic:
        add(x)
        add(x.half())
    counted = traffic["add_kernel"]
    assert counted.launches == 2
    programs = 2 * 2
    assert counted.stored == 29 * 4 + 29 * 2
    assert counted.loaded == counted.stored + (programs // 2) * (4 + 2)
    assert counted.moved == counted.loaded + counted.stored
    add(x)
    assert counted.launches == 2


def test_which_calls_a_backend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonBackend(lambda call: None)
    assert (backend.name, backend.missing) == ("triton", "")
    for device in ("cuda", "cuda:1", "xpu"):
        for named in (False, True):
            assert backend.unsupported_reason(call_on(device), named) is None
    for device in ("cpu", "mps", "meta"):
        assert f"it works on cuda and xpu tensors, got {device}" in str(
            backend.unsupported_reason(call_on(device), False)
        )
    for found, problem in ((True, None), (False, "start Python with TRITON_INTERPRET=1")):
        monkeypatch.setattr("sdm.ops.triton.backend.interpreting", lambda found=found: found)
        answer = backend.unsupported_reason(call_on("cpu"), named=True)
        assert answer is None if problem is None else problem in str(answer)
    with record():
        assert backend.unsupported_reason(call_on("meta"), named=True) is None
    gone = dataclasses.replace(backend, missing="not here")
    assert gone.unsupported_reason(call_on("cuda")) == "not here"


def test_the_interpreter_is_what_triton_was_imported_with() -> None:
    code = """
import os
from sdm.ops.triton.backend import interpreting
print(interpreting())
import triton
os.environ["TRITON_INTERPRET"] = "1"
print(interpreting())
"""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.split() == ["False", "False"]
