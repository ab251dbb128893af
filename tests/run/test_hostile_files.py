"""Files of a run and of an export that were damaged or put there to do harm: one error, at once."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from sdm.cli import main
from sdm.cli.train_options import parse
from sdm.errors import TrainingError
from sdm.run.checkpoint import CheckpointError, verify
from sdm.run.export import check_replaceable
from training.runs import recall_run, train

DEEP = b"[" * 100_000


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
@pytest.mark.parametrize("content", [None, DEEP, b"[]", b"null", b"\xff", b'{"format": ' + b"1" * 5000 + b"}"])
def test_checkpoints(tmp_path: Path, name: str, content: bytes | None) -> None:
    train(recall_run(), tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-00000008"
    (checkpoint / name).unlink()
    if content is None:
        os.mkfifo(checkpoint / name)  # nobody ever writes to it
    else:
        (checkpoint / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        verify(checkpoint)


@pytest.mark.parametrize("content", [None, DEEP, b"[]", b'{"model_type": {}}', b"\xff"])
def test_only_an_export_is_replaced(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        os.mkfifo(tmp_path / "config.json")
    else:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(TrainingError, match=r"config\.json in it is not of an export"):
        check_replaceable(tmp_path)


def test_a_run_is_continued_without_its_configuration_file(tmp_path: Path) -> None:
    """The newest checkpoint has it; what an edited file says is compared with that."""
    config = recall_run()
    train(config, tmp_path)
    path = tmp_path / "run.json"
    text = path.read_text()
    path.unlink()
    assert parse([str(tmp_path)]).config == config
    path.write_text(text.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(SystemExit, match="seed was 0 and is 1"):
        main(["train", str(tmp_path)])
    path.write_text(text.replace('"log_every": 2', '"log_every": 3'))
    assert parse([str(tmp_path)]).config == replace(config, monitor=replace(config.monitor, log_every=3))
