"""Modelled times of the memory's kernels, and what its GPU op allocates."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sdm.models.cost import LEVELS, ladder
from sdm.ops.sparse_delta_rule.triton.host import PARTS
from sdm.plan import ACCELERATORS, Workload, make_plan
from sdm.plan.dry_run import dry_run
from sdm.plan.estimate import recurrence_seconds
from sdm.plan.kernel_time import GPUS, MemoryCall, nearest_sizes, stored_kernels
from sdm.run.mesh import Mesh
from tiny_models import tiny_config

ROOT = Path(__file__).parents[2]


def test_stored_numbers_are_what_the_model_says() -> None:
    """Forward at level 1, few programs; the compiled kernels run in another process, for this one interprets Triton."""
    pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.triton_model", "--check-stored", "--levels", "1", "--gpus", "H100"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.stdout.endswith("0 differences\n"), result.stdout + result.stderr[-3000:]


def test_every_level_is_stored() -> None:
    for gpu in GPUS:
        for level in LEVELS.values():
            sizes = f"{level.num_memory_heads}x{level.hidden_size // level.num_memory_heads}"
            for layout in ("few", "many"):
                assert nearest_sizes(gpu, *map(int, sizes.split("x")), layout) == sizes
                names = stored_kernels()[gpu][sizes][layout]
                assert {"forward_kernel", "backward_kernel", "reduce_kernel", "select_kernel"} < set(names)
                assert not any(kernel.spilled for kernel in names.values())


def test_times_follow_the_call() -> None:
    """Twice the length takes twice the time; a full GPU takes turns; few accesses are cheaper."""
    gpu, call = GPUS["H100"], MemoryCall(8, 4096, 1, 768)
    (forward, backward), (twice, _) = call.seconds(gpu), replace(call, time=8192).seconds(gpu)
    assert forward.low <= forward.high < backward.high
    assert twice.high == pytest.approx(2 * forward.high, rel=0.01)
    assert call.seconds(gpu)[0].bandwidth == pytest.approx(2 * call.seconds(gpu, 6.7e12)[0].bandwidth)
    full = replace(call, batch=64).seconds(gpu)[0]
    assert full.bandwidth == pytest.approx(8 * forward.bandwidth)
    assert full.bandwidth < full.low <= full.high <= 8 * forward.high
    assert replace(call, writes=16, reads=16).seconds(gpu)[1].high < backward.high / 2


def test_memory_alone_is_faster_than_the_plan() -> None:
    """The kernels wait: at one row of level 8 they take at least twice as long as their bytes."""
    work = Workload(ladder(8), Mesh(), 8192, 1, 1)
    seconds = recurrence_seconds(work, ACCELERATORS["h100"])
    assert 2 * seconds.bandwidth < seconds.low < seconds.high
    again = recurrence_seconds(replace(work, checkpointing="none"), ACCELERATORS["h100"])
    assert again.high < seconds.high
    # Dense recurrences keep their state on the chip.
    dense = recurrence_seconds(replace(work, model=ladder(8, "gdn")), ACCELERATORS["h100"])
    assert dense.high < seconds.bandwidth / 10


def test_the_memory_of_the_gpu_op_is_counted() -> None:
    """A table and its gradient; a ring with room for one in eight writes, parts of gradients, and a little more."""
    work = Workload(ladder(1), Mesh(), 8192, 1, 1)
    block = dry_run(work)["sdm"]
    assert block.tables == 2 * 4 * 36864 * 768
    ring = 4 * 768 * 64 * 8192 // 8
    assert ring + 0.99 * PARTS < block.scratch < 1.3 * (ring + PARTS)
    # The parts are those of a window of time, the allowance is one of each slot and 8 channels: they do not grow.
    longer = dry_run(replace(work, sequence_length=65536))["sdm"]
    assert longer.tables == block.tables
    fixed = PARTS + 4 * 36864 * 768 // 8
    assert longer.scratch == pytest.approx(8 * (block.scratch - fixed) + fixed, rel=0.01)
    # Rows have tables of their own; ranks that split channels share the rest too.
    assert dry_run(replace(work, batch_size=4, rows=4))["sdm"].tables == 4 * block.tables
    assert make_plan(work, ACCELERATORS["h100"]).memory.states == block.tables


def test_the_cpu_core_has_a_few_channels_at_a_time() -> None:
    block = dry_run(Workload(tiny_config("sdm"), Mesh(), 40, 2, 2, "float32", "none", on_cpu=True))["sdm"]
    assert block.tables == block.scratch == 0 < block.in_recurrence


def test_plans_need_no_triton() -> None:
    """The same numbers come out where Triton cannot be imported."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "from sdm.models import ladder; from sdm.plan import *; from sdm.run.mesh import Mesh\n"
        "print(make_plan(Workload(ladder(1), Mesh(), 8192, 1, 1), ACCELERATORS['a100']).memory)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    expected = make_plan(Workload(ladder(1), Mesh(), 8192, 1, 1), ACCELERATORS["a100"]).memory
    assert result.stdout.strip() == str(expected), result.stderr[-2000:]
