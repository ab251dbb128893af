"""A run that was broken off and continued is the unbroken run, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdm.data import DataError
from sdm.errors import TrainingError
from sdm.models.model_config import ModelConfig
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, ScheduleConfig
from sdm.run.config_file import to_json
from sdm.run.model import export_run
from sdm.signals import TrainingStopped
from sdm.training import Trainer
from training.runs import assert_same, recall_run, text_run, train

WORKER = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from sdm.run.config import TrainConfig
from sdm.signals import TrainingStopped
from sdm.training import Trainer
from sdm.run.config_file import from_json
config = from_json(TrainConfig, json.loads(sys.argv[2]))
print("ready", flush=True)
try:
    Trainer(config, Path(sys.argv[1])).run()
except TrainingStopped as stopped:
    print(stopped)
    sys.exit(stopped.exit_code)
"""


def start(config: Any, folder: Path) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WORKER, str(folder), json.dumps(to_json(config))]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    return process


@pytest.mark.parametrize("layout", ["packed", "rows", "stream"])
def test_split_run_is_the_whole_run(tmp_path: Path, layout: str) -> None:
    config = text_run(tmp_path, layout)
    expected = train(config, tmp_path / "whole")
    trainer = Trainer(config, tmp_path / "split")
    for _ in range(5):
        trainer.train_step()
    trainer.save()
    trainer.close()
    assert_same(train(config, tmp_path / "split"), expected)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_accumulated_streams_resume(tmp_path: Path, accumulation: int) -> None:
    compute = ComputeConfig(threads=1, accumulation=accumulation, checkpointing="segment", segment_length=8)
    config = text_run(tmp_path, "stream", compute=compute)
    expected = train(config, tmp_path / "whole")
    trainer = Trainer(config, tmp_path / "split")
    for _ in range(4):
        trainer.train_step()
    trainer.save()
    trainer.close()
    assert_same(train(config, tmp_path / "split"), expected)


def kill_and_resume(folder: Path, steps: int, kills: int, seed: int) -> None:
    config = recall_run(
        schedule=ScheduleConfig(steps=steps, warmup=2),
        checkpoint=CheckpointConfig(every=2, keep=2),
        monitor=MonitorConfig(display="none", validation_batches=0),
    )
    start_time = time.perf_counter()
    expected = train(config, folder / "whole")
    duration = time.perf_counter() - start_time
    rng = random.Random(seed)
    for _ in range(kills):
        process = start(config, folder / "killed")
        time.sleep(rng.uniform(0, 1.5 * duration / max(kills, 4)) + 0.02)
        process.kill()
        process.communicate()
    assert_same(train(config, folder / "killed"), expected)
    assert not list((folder / "killed" / "checkpoints").glob(".step-*"))


def test_killed_runs_resume(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, steps=40, kills=2, seed=0)


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, steps=60, kills=20, seed=1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_save_first(tmp_path: Path, number: signal.Signals) -> None:
    config = recall_run(
        schedule=ScheduleConfig(steps=100_000, warmup=2),
        checkpoint=CheckpointConfig(every=100_000),
        monitor=MonitorConfig(display="none", log_every=1, validation_batches=0),
    )
    process = start(config, tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert number.name in printed
    assert "saved" in printed
    trainer = Trainer(config, tmp_path)
    trainer.resume()
    assert trainer.step > 0


def test_damaged_checkpoint_is_reported_and_the_one_before_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="sdm")
    config = recall_run(monitor=MonitorConfig(display="plain"))
    expected = train(config, tmp_path)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00000007", "step-00000008"]
    newest = next((tmp_path / "checkpoints" / "step-00000008").glob("*.safetensors"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    caplog.clear()
    assert_same(train(config, tmp_path), expected)
    assert "step-00000008 is damaged" in caplog.text
    assert "continuing after step 7" in caplog.text


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_missing_files_are_damage(tmp_path: Path, name: str) -> None:
    config = recall_run()
    expected = train(config, tmp_path)
    for step in ("step-00000008", "step-00000007"):
        (tmp_path / "checkpoints" / step / name).unlink()
        if step == "step-00000007":
            trainer = Trainer(config, tmp_path)
            with pytest.raises(TrainingError, match="all 2 checkpoints"):
                trainer.resume()
            trainer.close()
        else:
            assert_same(train(config, tmp_path), expected)
            (tmp_path / "checkpoints" / "step-00000008" / name).unlink()


def test_changed_configuration_is_refused(tmp_path: Path) -> None:
    config = recall_run()
    expected = train(config, tmp_path)
    with pytest.raises(TrainingError, match=r"optim.lr was 0.001 and is 0.5"):
        Trainer(replace(config, optim=replace(config.optim, lr=0.5)), tmp_path)
    with pytest.raises(TrainingError, match=r"schedule\.steps"):
        Trainer(replace(config, schedule=replace(config.schedule, steps=7)), tmp_path)
    # What does not change the numbers may change.
    assert_same(train(replace(config, monitor=MonitorConfig(display="none")), tmp_path), expected)


def test_a_run_that_did_not_begin_leaves_its_folder_free(tmp_path: Path) -> None:
    large = recall_run(model=ModelConfig(hidden_size=4096, num_hidden_layers=400))
    with pytest.raises(TrainingError, match=r"Lower data\.batch_size"):
        Trainer(large, tmp_path)
    assert not (tmp_path / "run.json").exists()
    Trainer(text_run(tmp_path, seed=1), tmp_path).close()
    (tmp_path / "run.json").write_text("{")  # nothing was trained with it
    assert_same(train(recall_run(), tmp_path), train(recall_run(), tmp_path / "new"))
    assert not (export_run(tmp_path) / "tokenizer.json").exists()


def test_text_to_validate_on_is_looked_for_at_once(tmp_path: Path) -> None:
    config = text_run(tmp_path)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(300)))
    without = replace(config, data=replace(config.data, sources=(str(lines),), valid_fraction=1e-9))
    with pytest.raises(DataError, match="raise valid_fraction"):
        Trainer(without, tmp_path / "run")
    Trainer(replace(without, monitor=MonitorConfig(display="none", validation_batches=0)), tmp_path / "run").close()


def test_a_signal_within_a_step(tmp_path: Path) -> None:
    """The step that has begun is undone; the one before is saved and continued from."""
    config = text_run(tmp_path, "rows", compute=ComputeConfig(threads=1, accumulation=4))
    config = replace(config, model=replace(config.model, query_batch_norm=True))
    expected = train(config, tmp_path / "whole")
    trainer = Trainer(config, tmp_path / "split")
    pieces = []

    def piece_loss(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            pieces.append(trainer.step)
            if len(pieces) == 4 * 4 + 2:  # the second piece of the fifth step
                os.kill(os.getpid(), signal.SIGTERM)
        return loss(*arguments)

    loss = trainer._loss
    trainer._loss = piece_loss  # type: ignore[method-assign]
    with pytest.raises(TrainingStopped, match="SIGTERM: stopped after step 4, which is saved"):
        trainer.run()
    assert len(pieces) == 4 * 4 + 2
    assert trainer.store.steps()[-1] == 4
    assert_same(train(config, tmp_path / "split"), expected)


def test_changed_text_is_refused(tmp_path: Path) -> None:
    config = text_run(tmp_path)
    train(config, tmp_path / "run")
    (tmp_path / "texts" / "3.txt").write_text("something else entirely, and long enough to matter. " * 8)
    with pytest.raises(DataError, match="the data changed"):
        Trainer(config, tmp_path / "run").run()


def test_one_process_per_folder(tmp_path: Path) -> None:
    first = Trainer(recall_run(), tmp_path)
    with pytest.raises(TrainingError, match="another process"):
        Trainer(recall_run(), tmp_path)
    first.run()


def test_metrics_are_rewound(tmp_path: Path) -> None:
    config = recall_run()
    train(config, tmp_path)
    path = tmp_path / "metrics.jsonl"
    before = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    for folder in (tmp_path / "checkpoints").iterdir():
        if folder.name == "step-00000008":
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    with path.open("a") as file:
        file.write('{"step": 7, "loss"')  # what a killed process leaves
    train(config, tmp_path)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == before == [2, 4, 6, 8]
