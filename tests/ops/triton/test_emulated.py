"""The compiled kernels in an emulator, against the reference: errors, bounds, races.

The tests of this process interpret Triton, so that the compiled kernels run in another one. A few small cases are run
by default; all shipped layouts are slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
ROOT = Path(__file__).parents[3]


def emulate(*arguments: str) -> list[dict[str, Any]]:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.triton_emulate", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.stdout, result.stderr[-3000:]
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, (result.stderr[-3000:], [x for x in reports if x.get("failed")])
    return reports


def test_small_cases() -> None:
    """Documents, replicated sums, a step whose rows several warps read."""
    names = ["W = R = 4", "packed, slot rule", "step, W = 2, R = 128, slot rule"]
    reports = emulate("--targets", "sm_90", "--cases", *names)
    assert [x["case"] for x in reports] == names
    assert all(x["ran"] and not x["races"] and x["error"] < 1e-5 for x in reports)


def test_senseless_documents_lead_nowhere() -> None:
    (report,) = emulate("--targets", "sm_90", "--senseless")
    assert report["blocks"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_all_layouts(target: str) -> None:
    reports = emulate("--targets", target)
    levels = [x for x in reports if x["case"].startswith("level") and "bfloat16" not in x["case"]]
    assert len(levels) == 9  # three of them, with the fewest programs, few and many
    assert all(x["error"] <= 1e-6 for x in levels), levels
    assert not any(x["races"] for x in reports)


# Barriers that nobody misses are those beside one that Triton adds itself, for the exchange of a tile or a sum; they
# stay, because nothing promises those.
BARRIERS = {
    "one block, backward of several warps": {"prepare.py": [True, True, True], "forward.py": [False, True]}
    | {"replay.py": [True, True], "backward.py": [False, True, True]},
    "one block, packed, one table": {"restore.py": [True, True]},
    "step, W = 4, R = 64": {"step.py": [False, True]},
}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_removed_barriers_are_noticed(target: str) -> None:
    """Each barrier that a kernel asks for, in the order of its file: whether a race is seen without it."""
    for report in emulate("--targets", target, "--barriers", "--cases", *BARRIERS):
        by_file: dict[str, list[tuple[int, bool]]] = {}
        for line, seen in report["barriers"].items():
            file, number = line.split(":")
            by_file.setdefault(file, []).append((int(number), seen))
        for file, expected in BARRIERS[report["case"]].items():
            assert [seen for _, seen in sorted(by_file[file])] == expected, (report["case"], file)


def test_gated_delta_rule() -> None:
    """Its kernels, compiled: chunks of 64 and of 16 tokens, decays of heads and of channels, documents, short rows."""
    reports = emulate("--targets", "sm_80", "sm_90", "--gated")
    assert len(reports) == 6
    assert all(x["ran"] and not x["races"] and x["error"] < 1e-6 for x in reports)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_spills_blocks_and_barriers(gpu: str) -> None:
    """What the layouts were chosen for still holds in the compiled kernels of level 1."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.triton_model", "--check", "--levels", "1", "--gpus", gpu]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.stdout.endswith("0 problems\n"), result.stdout + result.stderr[-3000:]
