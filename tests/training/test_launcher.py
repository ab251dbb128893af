"""Ranks and what has started them: they end with it, and leave their process group at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sdm.run import Run
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, ScheduleConfig
from sdm.run.config_file import to_json
from training.runs import recall_run

PROGRAM = """
import atexit, json, os, sys, torch
from pathlib import Path
import torch.distributed as dist
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
# Functions that were registered first run last: this one sees what the others have left.
atexit.register(lambda: (folder / f"left-{rank}").write_text(str(dist.is_initialized())))
(folder / f"pid-{rank}").write_text(str(os.getpid()))
torch.set_num_threads(1)
from sdm.signals import ending_with_one_message
from sdm.run.config_file import from_json
from sdm.run.config import TrainConfig
from sdm.training import Trainer
with ending_with_one_message():
    Trainer(from_json(TrainConfig, json.loads((folder / "config.json").read_text())), folder / "run").run()
"""


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """Two ranks under torchrun."""
    config = recall_run(
        schedule=ScheduleConfig(steps=steps),
        compute=ComputeConfig(threads=1, device="cpu"),
        checkpoint=CheckpointConfig(every=10**6),
        monitor=MonitorConfig(log_every=1, display="none", validation_batches=0),
    )
    (folder / "program.py").write_text(PROGRAM)
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, str(folder / "program.py"), str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    """torchrun is killed without a chance to end its ranks: they save and end by themselves."""
    launcher = start(tmp_path, 10**6)
    pids: list[int] = []
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert launcher.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
        assert all(map(alive, pids))
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + 60
        while any(map(alive, pids)):
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
    finally:
        launcher.kill()
        launcher.wait()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
    text = (tmp_path / "log").read_text()
    assert f"the launcher (process {launcher.pid}) is gone" in text
    assert re.search(r"(SIGTERM|another rank ends): stopped after step \d+, which is saved", text), text
    store = Run(tmp_path / "run").checkpoints()
    assert store.newest() is not None


def test_the_process_group_is_destroyed(tmp_path: Path) -> None:
    launcher = start(tmp_path, 3)
    assert launcher.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    assert [(tmp_path / f"left-{rank}").read_text() for rank in range(2)] == ["False", "False"]
