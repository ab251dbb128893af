"""A run that must end saves first, says so if anybody hears it, and has an exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdm.run.config import CheckpointConfig, MonitorConfig, ScheduleConfig
from sdm.run.config_file import to_json
from sdm.signals import TrainingStopped
from sdm.training import Trainer
from training.runs import assert_same, recall_run, train

WORKER = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from sdm.signals import ending_with_one_message
from sdm.run.config import TrainConfig
from sdm.training import Trainer
from sdm.run.config_file import from_json
with ending_with_one_message():
    Trainer(from_json(TrainConfig, json.loads(sys.argv[2])), Path(sys.argv[1])).run()
"""


def endless(**monitor: Any) -> Any:
    return recall_run(
        schedule=ScheduleConfig(steps=1_000_000, warmup=2),
        checkpoint=CheckpointConfig(every=1_000_000),
        monitor=MonitorConfig(log_every=1, validation_batches=0, **monitor),
    )


def worker(config: Any, folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WORKER, str(folder), json.dumps(to_json(config))], **options)


class Dying(io.StringIO):
    """A standard output that somebody takes away."""

    def __init__(self, error: OSError, lines: int) -> None:
        super().__init__()
        self.error, self.lines = error, lines

    def write(self, text: str) -> int:
        self.lines -= text.count("\n")
        if self.lines < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize(
    ("error", "code"),
    [(BrokenPipeError(errno.EPIPE, "Broken pipe"), 128 + signal.SIGPIPE), (OSError(errno.ENOSPC, "No space left"), 1)],
)
def test_a_dead_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, code: int) -> None:
    config = recall_run(monitor=MonitorConfig(log_every=1, display="none"), checkpoint=CheckpointConfig(every=100))
    expected = train(config, tmp_path / "whole")
    shown = replace(config, monitor=replace(config.monitor, display="plain"))
    trainer = Trainer(shown, tmp_path / "run")
    monkeypatch.setattr(sys, "stdout", Dying(error, 3))
    with pytest.raises(TrainingStopped, match=r"the output is gone .*stopped after step \d, which is saved") as stopped:
        trainer.run()
    monkeypatch.undo()
    assert stopped.value.exit_code == code
    assert trainer.store.steps() == [trainer.step]
    assert 0 < trainer.step < 8
    assert_same(train(config, tmp_path / "run"), expected)


@pytest.mark.parametrize("errors", ["apart", pytest.param("joined", marks=pytest.mark.slow)])
def test_head(tmp_path: Path, errors: str) -> None:
    """sdm train ... | head -2, with and without 2>&1."""
    process = worker(
        endless(display="plain"),
        tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if errors == "apart" else subprocess.STDOUT,
    )
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.stdout.close()
    if errors == "apart":
        assert process.stderr is not None
        said = process.stderr.read().decode()
        process.stderr.close()
        assert "stopped: the output is gone" in said
        assert len(said.splitlines()) == 1, said
    assert process.wait(timeout=120) == 128 + signal.SIGPIPE
    assert list((tmp_path / "checkpoints").iterdir())


def test_an_output_that_is_dead_from_the_start(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process = worker(endless(display="plain"), tmp_path, stdout=full, stderr=subprocess.PIPE)
        said = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 1
    # A busy machine adds a line about itself.
    (line,) = (line for line in said.splitlines() if "oversubscribed" not in line)
    assert "No space left" in line


def test_a_closed_terminal(tmp_path: Path) -> None:
    """It takes input, output and errors with it, and says SIGHUP."""
    master, slave = pty.openpty()
    # The terminal that a new session opens first becomes its own.
    session = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); " + WORKER
    arguments = [sys.executable, "-c", session, str(tmp_path), json.dumps(to_json(endless(display="auto")))]
    process = subprocess.Popen(arguments, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    metrics = tmp_path / "metrics.jsonl"
    while not metrics.exists():
        os.read(master, 1000)
    os.close(master)
    assert process.wait(timeout=120) == 128 + signal.SIGHUP
    assert list((tmp_path / "checkpoints").iterdir())


def test_the_first_signal_is_acknowledged_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sdm.training")
    config = recall_run(monitor=MonitorConfig(display="plain"))
    trainer = Trainer(config, tmp_path)
    said = []

    def interrupted(*arguments: Any) -> Any:
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            said.append(caplog.messages[-1])
        return loss(*arguments)

    loss = trainer._loss
    trainer._loss = interrupted  # type: ignore[method-assign]
    with pytest.raises(TrainingStopped, match="SIGINT: stopped after step 4, which is saved"):
        trainer.run()
    assert said == [f"{tmp_path.name}: SIGINT: finishing step 4; again to end now"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
