"""A run has a folder of its own, and touches nobody else's files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from run.test_export import content
from sdm.errors import TrainingError
from sdm.reproduce.jobs import Job, run_jobs
from sdm.run.checkpoint import CheckpointError, CheckpointStore
from sdm.training import Trainer
from training.runs import recall_run, train


@pytest.mark.parametrize(
    "files",
    [
        {"run.json": '{"program": "another"}'},
        {"run.json": "{}"},
        {"metrics.jsonl": '{"step": 1}\n'},
        {"tokenizer/tokenizer.json": "{}"},
        {"export/thesis.txt": "years of work"},
        {"weights.safetensors": "of another model"},
        {"checkpoints/step-99999999/model.safetensors": "of another program"},
        {"notes.md": "x", ".lock": ""},
    ],
)
def test_a_folder_of_others_is_refused(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = content(tmp_path)
    first = next(iter(files)).split("/")[0]
    with pytest.raises(TrainingError, match=rf"--run-dir: .* is not a run's folder and holds {first}; .*empty folder"):
        Trainer(recall_run(), tmp_path)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("export/thesis.txt", "export would be replaced, but thesis.txt in it is not of an export"),
        ("export/unrelated.safetensors", "but unrelated.safetensors in it is not of an export"),
        ("checkpoints/step-99999999/model.safetensors", "model.safetensors is not of this checkpoint"),
        ("checkpoints/step-00000003/weights (1).safetensors", r"weights \(1\).safetensors is not of this checkpoint"),
    ],
)
def test_files_of_others_in_a_run_stop_it_before_any_work(tmp_path: Path, name: str, message: str) -> None:
    config = recall_run()
    trainer = Trainer(config, tmp_path)
    for _ in range(3):
        trainer.train_step()
    trainer.save()
    trainer.close()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = content(tmp_path)
    with pytest.raises(TrainingError, match=message):
        Trainer(config, tmp_path)
    assert content(tmp_path) == before


@pytest.mark.parametrize("step", [1, 99_999_999])
def test_what_comes_later_is_left_alone(tmp_path: Path, step: int) -> None:
    store, tensors = CheckpointStore(tmp_path, keep=1), {"x": torch.zeros(2)}
    theirs = store.path(step) / "model.safetensors"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    for own in (2, 3):
        store.save(own, tensors, {})
    assert store.steps() == sorted((3, step))
    with pytest.raises(CheckpointError, match=r"model.safetensors is not of this checkpoint"):
        store.save(step, tensors, {})
    assert theirs.read_text() == "mine"


def test_hidden_files_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / ".gitkeep").touch()
    Trainer(recall_run(), tmp_path).close()
    assert (tmp_path / ".gitkeep").exists()


@pytest.mark.parametrize("damage", ["missing", "damaged", "changed"])
def test_the_configuration_is_that_of_the_checkpoint(tmp_path: Path, damage: str) -> None:
    """Whatever became of run.json."""
    config = recall_run()
    train(config, tmp_path)
    path, other = tmp_path / "run.json", replace(config, seed=1)
    if damage == "missing":
        path.unlink()
    else:
        path.write_text("{" if damage == "damaged" else path.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(TrainingError, match="seed was 0 and is 1"):
        Trainer(other, tmp_path)
    Trainer(config, tmp_path).close()
    assert json.loads(path.read_text())["seed"] == 0


def test_what_a_killed_process_was_writing_goes(tmp_path: Path) -> None:
    Trainer(recall_run(), tmp_path).close()
    for name in (".0123abcd", ".0123abcd-run.json", ".0123abcd-metrics.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / ".mine-run.json").touch()
    Trainer(recall_run(), tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {".sdm-run", ".mine-run.json", "run.json"}


def test_jobs_do_not_take_folders_of_others(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.md").write_text("mine")
    with pytest.raises(TrainingError, match=r"is not a run's folder and holds notes.md"):
        run_jobs([Job("a", recall_run(), "recall")], tmp_path, 1, lambda metrics: None)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["notes.md"]
