"""The script for people who have a GPU, up to the point where it needs one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SIZES = {"width": 16, "heads": 1, "slots": 64, "time": 12, "accesses": 4, "batch": 2, "drawn": "product keys"}


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_everything_but_the_graphs_runs_on_a_cpu() -> None:
    from benchmarks import gpu

    cases = [*gpu.SMALL, gpu.Case(time=9, slots=64, drawn="zipf", dtype=torch.bfloat16)]
    packed = {**SIZES, "batch": 1, "documents": 3, "dtype": "bfloat16"}
    result = gpu.report("cpu", ["chunked"], [SIZES, packed], cases)
    assert result["right"], result
    assert 0 < result["difference / tolerance"]["chunked"] < 1
    for timed in result["ratios"]:
        assert timed["decode step"] > 0
        for way in ("forward", "forward + backward"):
            assert timed[way]["sdm / other"]["sdpa"] > 0


def test_the_model_stands_beside_what_is_measured() -> None:
    from benchmarks import gpu

    sizes = {"batch": 8, "time": 8192, "heads": 1, "width": 768}
    for low, high in gpu.modelled("NVIDIA H100 80GB HBM3", sizes).values():
        assert 0 < low <= high < 0.2
    assert gpu.modelled("AMD Instinct MI300X", sizes) == {}


def test_nothing_is_timed_where_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu

    monkeypatch.setattr(gpu, "correctness", lambda device, backends, cases: {"chunked": 1.1})
    result = gpu.report("cpu", ["chunked"], [SIZES], gpu.SMALL)
    assert not result["right"]
    assert "ratios" not in result


def test_the_shipped_layouts_are_among_the_cases() -> None:
    from benchmarks import gpu
    from sdm.ops.sparse_delta_rule.triton.layout import FORWARD, Layout

    seen = {Layout.for_streams(c.accesses, c.accesses, c.channels, FORWARD, c.batch * c.heads) for c in gpu.SHIPPED}
    assert {layout.C for layout in seen} == {2, 8, 16}


@pytest.mark.skipif(torch.cuda.is_available() or torch.xpu.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = subprocess.run([sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "there is no GPU here that torch can use" in result.stdout
