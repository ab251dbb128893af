"""The script for people who have a GPU, up to the point where it needs one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SMALL = {"width": 16, "heads": 1, "slots": 64, "time": 12, "accesses": 4}


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_everything_but_the_graphs_runs_on_a_cpu() -> None:
    from benchmarks import gpu

    result = gpu.report("cpu", ["chunked"], [SMALL])
    assert result["right"]
    assert 0 < result["differences"]["chunked"] < gpu.TOLERANCE
    for way in ("forward", "forward + backward"):
        assert result["ratios"][0][way]["sdm / other"]["sdpa"] > 0


def test_nothing_is_timed_where_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu

    monkeypatch.setattr(gpu, "correctness", lambda device, backends: {"chunked": 0.1})
    result = gpu.report("cpu", ["chunked"], [SMALL])
    assert not result["right"]
    assert "ratios" not in result


@pytest.mark.skipif(torch.cuda.is_available() or torch.xpu.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = subprocess.run([sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "there is no GPU here that torch can use" in result.stdout
