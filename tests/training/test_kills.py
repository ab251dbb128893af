"""A run that is killed at any of its operations on files goes on to the same end, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sdm.run.config import CheckpointConfig, MonitorConfig
from sdm.run.config_file import to_json
from training.runs import text_run

# Imports once, then forks: every run is a process of its own, which kills itself at one of its operations on files.
DRIVER = """
import json, os, random, shutil, signal, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from safetensors.torch import load_file, save
from sdm.run.config import TrainConfig
from sdm.training import Trainer
from sdm.run.config_file import from_json

root, config, trials = Path(sys.argv[1]), from_json(TrainConfig, json.loads(sys.argv[2])), int(sys.argv[3])
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}

def run(folder, last=None):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    count, sync = 0, os.fsync

    def operation():
        nonlocal count
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event, arguments):
        if event in EVENTS and str(folder) in str(arguments[0]):
            operation()

    def fsync(descriptor):
        operation()
        sync(descriptor)

    code = 1
    try:
        os.fsync = fsync
        sys.addaudithook(hook)
        Trainer(config, folder).run()
        (root / "count").write_text(str(count))
        code = 0
    finally:
        os._exit(code)

def content(folder):
    tensors = {str(path.relative_to(folder)): save(load_file(path)) for path in folder.rglob("*.safetensors")}
    return tensors | {str(path.relative_to(folder)): b"" for path in folder.rglob(".*")}

assert run(root / "whole") == 0
expected, operations = content(root / "whole"), int((root / "count").read_text())
rng, good, killed, differing = random.Random(0), 0, 0, []
for trial in range(trials):
    folder = root / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    for _ in range(rng.randint(1, 3)):
        killed += run(folder, rng.randint(1, operations)) == signal.SIGKILL
    assert run(folder) == 0, trial
    # A checkpoint that was about to be removed may still be there: nothing was saved after it.
    found = {name: x for name, x in content(folder).items() if "/step-" not in name or name in expected}
    good += found == expected
    differing += [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
print(json.dumps({"operations": operations, "killed": killed, "good": good, "differing": differing}))
"""


def kills(folder: Path, trials: int) -> None:
    config = text_run(
        folder,
        checkpoint=CheckpointConfig(every=3, keep=1),
        monitor=MonitorConfig(log_every=1, validation_batches=0, display="none"),
    )
    arguments = [sys.executable, "-c", DRIVER, str(folder), json.dumps(to_json(config)), str(trials)]
    found = json.loads(subprocess.run(arguments, check=True, stdout=subprocess.PIPE).stdout)
    assert found["operations"] > 50
    assert found["killed"] >= trials
    assert found["differing"] == []
    assert found["good"] == trials


def test_kills_at_operations_on_files(tmp_path: Path) -> None:
    kills(tmp_path, 5)


@pytest.mark.slow
def test_two_hundred_kills_at_operations_on_files(tmp_path: Path) -> None:
    kills(tmp_path, 200)
