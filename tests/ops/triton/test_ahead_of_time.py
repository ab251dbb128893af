"""A kernel compiled for GPUs that are not here; `make triton-aot` compiles them all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")

CODE = """
import dataclasses
import torch
from sdm.ops.product_key.triton.host import topk_backward
from sdm.ops.triton.ahead_of_time import TARGETS, Resources, compile_launch
from sdm.ops.triton.launch import record

index = torch.empty(7, 64, dtype=torch.int64, device="meta")
with record() as launches:
    topk_backward(torch.empty(7, 64, device="meta"), index, 192, torch.bfloat16)
for target in TARGETS.values():
    taken = compile_launch(launches[0], target)
    assert 10 < taken.registers < 256, taken
    assert taken.problem(target) is None
    assert "spills 8 bytes" in dataclasses.replace(taken, spilled=8).problem(target)
    assert "shared memory" in dataclasses.replace(taken, shared=target.shared_limit + 1).problem(target)
# With a quarter of the registers that it takes, the spills are seen.
narrow = dataclasses.replace(launches[0], options=launches[0].options | {"maxnreg": 16})
assert compile_launch(narrow, TARGETS["sm_80"]).spilled > 0
print("compiled")
"""


def test_compiles_for_three_gpus_and_sees_spills() -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment)
    assert result.stdout.strip() == "compiled", result.stderr[-3000:]
