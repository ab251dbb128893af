"""Ranks that are killed: the job ends in bounded time and says who, restarts continue, fewer ranks go on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdm.models.saved_folder import load_model
from sdm.run import Run
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, ScheduleConfig, TrainConfig
from sdm.run.config_file import to_json
from training.runs import assert_same, recall_run, text_run
from training.test_ranks import TESTS, assert_near, launch

pytestmark = pytest.mark.slow

CODE = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from sdm.signals import ending_with_one_message
from sdm.run.config_file import from_json
from sdm.run.config import TrainConfig
from sdm.training import Trainer
with ending_with_one_message():
    Trainer(from_json(TrainConfig, json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2])).run()
"""


def prepare(folder: Path, config: TrainConfig) -> list[str]:
    """The program of a rank, and what it trains."""
    (folder / "program.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    return [str(folder / "program.py"), str(folder / "config.json")]


@contextlib.contextmanager
def launched(ranks: int, options: list[str], arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *options, *arguments]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipe)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def children(parent: int) -> dict[int, int]:
    """The workers of a torchrun, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                environment = dict(
                    entry.split("=", 1) for entry in (folder / "environ").read_text().split("\0") if "=" in entry
                )
                found[int(environment["RANK"])] = int(folder.name)
    return found


def wait_for_step(run: Run, step: int, process: subprocess.Popen[str], timeout: float = 300) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        metrics = run.metrics()
        if metrics and metrics[-1]["step"] >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached")


def long_run(steps: int, every: int = 2) -> TrainConfig:
    return recall_run(
        schedule=ScheduleConfig(steps=steps, warmup=2),
        checkpoint=CheckpointConfig(every=every),
        compute=ComputeConfig(threads=1, device="cpu"),
        monitor=MonitorConfig(log_every=1, memory_every=0, validation_batches=0, display="none"),
    )


def test_a_killed_rank_ends_the_job_by_name(tmp_path: Path) -> None:
    arguments = prepare(tmp_path, long_run(100_000, every=100_000))
    with launched(2, ["--standalone"], [*arguments, str(tmp_path / "run")]) as process:
        wait_for_step(Run(tmp_path / "run"), 3, process)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        start = time.monotonic()
        printed, _ = process.communicate(timeout=60)
        assert time.monotonic() - start < 45
    assert process.returncode != 0
    root_cause = printed.split("Root Cause")[1]
    assert "rank      : 1 " in root_cause
    assert "SIGKILL" in root_cause


def test_five_kills(tmp_path: Path) -> None:
    """One of four ranks each time, at random moments: the weights are those of an unbroken run, bit for bit."""
    config, steps = long_run(60), 60
    arguments = prepare(tmp_path, config)
    result = launch(4, *arguments, str(tmp_path / "whole"))
    assert result.returncode == 0, result.stdout + result.stderr
    rng, run = random.Random(0), Run(tmp_path / "killed")
    killed = []
    with launched(4, ["--standalone", "--max-restarts=8"], [*arguments, str(run.folder)]) as process:
        for kill in range(5):
            wait_for_step(run, kill * 10 + 2, process)
            time.sleep(rng.uniform(0, 0.5))
            reached = run.metrics()[-1]["step"]
            if reached < steps:
                rank = rng.randrange(4)
                os.kill(children(process.pid)[rank], signal.SIGKILL)
                killed.append((rank, reached))
        printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    assert len(killed) == 5, killed
    models = [load_model(Run(tmp_path / name).export).state_dict() for name in ("killed", "whole")]
    assert_same(models[0], models[1])
    assert [line["step"] for line in run.metrics()] == list(range(1, steps + 1))


def test_a_lost_machine_leaves_fewer_ranks(tmp_path: Path) -> None:
    """Streams of five rows on three ranks, then on two: the same batches, each row with its state."""
    sections = long_run(40)
    config = text_run(
        tmp_path,
        "stream",
        schedule=sections.schedule,
        checkpoint=sections.checkpoint,
        monitor=sections.monitor,
    )
    config = replace(config, data=replace(config.data, batch_size=5))
    arguments = prepare(tmp_path, config)
    result = launch(1, *arguments, str(tmp_path / "one"))
    assert result.returncode == 0, result.stdout + result.stderr
    run = Run(tmp_path / "elastic")
    port = random.SystemRandom().randrange(20000, 60000)
    options = [
        "--nnodes=1:3",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=test",
    ]

    def machine(number: int) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        # The first one keeps the rendezvous and cannot be the machine that is lost. Here all have its address, and
        # which of them comes first would be chance.
        host = f"is_host={number == 0},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
        return launched(1, [*options, f"--rdzv-conf={host}"], [*arguments, str(run.folder)])

    with machine(0) as first, machine(1) as second, machine(2) as third:
        wait_for_step(run, 5, first)
        for worker in children(third.pid).values():
            os.kill(worker, signal.SIGKILL)
        os.killpg(third.pid, signal.SIGKILL)
        for kept in (first, second):
            printed, _ = kept.communicate(timeout=300)
            assert kept.returncode == 0, printed
    assert [line["step"] for line in run.metrics()] == list(range(1, 41))
    models = [load_model(one.export).state_dict() for one in (run, Run(tmp_path / "one"))]
    assert_near(models[0], models[1], 1e-4)
    losses = [[line["loss"] for line in one.metrics()] for one in (run, Run(tmp_path / "one"))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_command(tmp_path: Path) -> None:
    """One display, one message, and bad meshes are refused before the ranks meet."""
    recall = ["-m", "sdm", "train", "recall", "--run-dir", str(tmp_path / "run"), "--schedule.steps", "4"]
    result = launch(2, *recall, "--monitor.validation-batches", "0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("try `sdm generate") == 1
    assert result.stdout.count("step 4/4") == 1
    refused = launch(2, *recall[:4], "--run-dir", str(tmp_path / "other"), "--compute.mesh.data", "3")
    assert refused.returncode != 0
    assert "takes 3, but there are 2 processes" in refused.stderr
    assert "rank 1: error" in refused.stderr
    assert not (tmp_path / "other").exists()
