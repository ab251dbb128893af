"""Checkpoints are complete or not there."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from sdm.errors import TrainingError
from sdm.files import file_entry
from sdm.run import checkpoint as module
from sdm.run.checkpoint import CheckpointError, CheckpointStore, verify
from sdm.run.model import export_run
from sdm.signals import TrainingStopped
from sdm.training import Trainer
from training.runs import assert_same, recall_run, train

TENSORS = {
    "matrix": torch.arange(6.0).view(2, 3),
    "scalar": torch.tensor(3.5),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "half": torch.ones(4, dtype=torch.bfloat16),
}


def test_round_trip(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(7, TENSORS, {"note": "x"})
    state = store.newest()
    assert state is not None
    assert state["step"] == 7
    assert state["note"] == "x"
    loaded = {name: torch.zeros_like(x) for name, x in TENSORS.items()}
    store.load(7, loaded)
    for name, x in TENSORS.items():
        assert torch.equal(loaded[name], x), name


def test_no_pickle_is_written(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(1, TENSORS, {})
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 6):
        store.save(step, TENSORS, {})
    assert store.steps() == [4, 5]


def test_damaged_ones_do_not_push_out_good_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        store.save(step, TENSORS, {})
    for step in (7, 8, 9):
        store.path(step).mkdir()
    again = CheckpointStore(tmp_path, keep=2)
    state = again.newest()
    assert state is not None
    assert state["step"] == 2
    again.save(3, TENSORS, {})
    assert again.steps() == [2, 3]
    again.save(4, TENSORS, {}, prune=False)
    assert again.steps() == [2, 3, 4]


@pytest.mark.parametrize("manifest", [{}, [], None, {"state.json": {}}, {"other.safetensors": {}}])
def test_a_manifest_names_all_files(tmp_path: Path, manifest: Any) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, TENSORS, {})
    path = store.save(2, TENSORS, {})
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="damaged"):
        verify(path)
    state = store.newest()
    assert state is not None
    assert state["step"] == 1


def test_only_files_of_the_manifest_are_read(tmp_path: Path) -> None:
    """A copy that a program for sharing folders makes of a conflict has other weights, and a name that torch reads."""
    store = CheckpointStore(tmp_path)
    path = store.save(1, TENSORS, {})
    CheckpointStore(tmp_path / "other").save(1, {name: x + 1 for name, x in TENSORS.items()}, {})
    (other,) = (tmp_path / "other").rglob("*.safetensors")
    for name in ("shard-00001-model-00001-of-00001 (conflict).safetensors", "zz.safetensors", "0.safetensors"):
        shutil.copy(other, path / name)
        with pytest.raises(TrainingError, match=rf"{re.escape(name)} is not of this checkpoint.*move it elsewhere"):
            store.newest()
        loaded = {key: torch.zeros_like(x) for key, x in TENSORS.items()}
        store.load(1, loaded)
        assert_same(loaded, TENSORS)
        (path / name).unlink()
    store.newest()


def test_what_cannot_be_loaded_is_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is written anew when the run gets there again."""
    config = recall_run()
    expected = train(config, tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints")
    (file,) = store.path(8).glob("*.safetensors")
    file.write_bytes(b"rubbish")
    manifest = json.loads((store.path(8) / "manifest.json").read_text())
    manifest[file.name] = file_entry(file)
    (store.path(8) / "manifest.json").write_text(json.dumps(manifest))
    verify(store.path(8))
    export_run(tmp_path, tmp_path / "export of step 7")
    assert "step-00000008 cannot be read" in caplog.text
    assert_same(train(config, tmp_path), expected)
    assert_same(train(config, tmp_path), expected)
    assert file.stat().st_size > 1000


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older checkpoints stay, the unfinished one goes, and the message says both."""
    store = CheckpointStore(tmp_path)
    store.save(1, TENSORS, {})

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "_write_data", full)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written.*No space left.*step 1 is the newest"):
        store.save(2, TENSORS, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    verify(store.path(1))
    monkeypatch.setattr(module, "write_json", full)
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(2, TENSORS, {})


def test_full_disk_stops_a_run_that_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recall_run()

    def full(store: CheckpointStore, step: int, *arguments: Any) -> Path:
        if step == 6:
            raise CheckpointError("No space left on device")
        return save(store, step, *arguments)

    save = CheckpointStore.save
    monkeypatch.setattr(CheckpointStore, "save", full)
    with pytest.raises(TrainingStopped, match=r"stopped after step 6.*No space left") as stopped:
        Trainer(config, tmp_path).run()
    assert stopped.value.exit_code != 0
    monkeypatch.undo()
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [3]
    train(config, tmp_path)


def test_newer_format_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(1, TENSORS, {})
    state = json.loads((path / "state.json").read_text()) | {"format": 99}
    (path / "state.json").write_text(json.dumps(state))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["state.json"] = file_entry(path / "state.json")
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="format 99"):
        verify(path)
