"""A kernel compiled for GPUs that are not here; `make triton-aot` compiles them all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


SASS = """
import torch
from benchmarks._triton_cases import launches_of, rule, step
from sdm.ops.triton.ahead_of_time import TARGETS, code_problem, compiled, machine_code

launches = launches_of(lambda: rule(1, torch.float32, training=False)) + launches_of(lambda: step(1, torch.float32))
walked = {launch.name: launch for launch in launches if launch.name in ("forward_kernel", "step_kernel")}
assert len(walked) == 2
for name, launch in walked.items():
    assert code_problem(launch, TARGETS["sm_90"]) is None
    code = machine_code(launch, TARGETS["sm_90"])
    # The assembler adds no barrier, and drops none.
    barriers = sum(count for x, count in code.items() if x.startswith("BAR.SYNC"))
    assert barriers == compiled(launch, TARGETS["sm_90"]).asm["ptx"].count("bar.sync") > 0, name
    assert sum(count for x, count in code.items() if x.startswith("LDG")) > 0

# Such a load would be noticed.
import sdm.ops.triton.ahead_of_time as module
counts = machine_code(walked["step_kernel"], TARGETS["sm_90"]) + module.Counter({"LDG.E.128.CONSTANT": 1})
module.machine_code = lambda launch, target: counts
assert "LDG.E.128.CONSTANT" in code_problem(walked["step_kernel"], TARGETS["sm_90"])
print("read")
"""


def test_machine_code_reads_the_table_as_it_is() -> None:
    """No load through the read-only path, and as many barriers as the PTX has, which the emulator runs."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", SASS], capture_output=True, text=True, env=environment, cwd=root)
    assert result.stdout.strip() == "read", result.stderr[-3000:]
