"""A run's folder from before its beginning to its end, and the model that it has at each stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sdm.errors import TrainingError
from sdm.run import Run
from sdm.run.model import SavedModel
from sdm.training import Trainer
from training.runs import STEPS, recall_run


def test_stages_of_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sdm.run")
    folder = tmp_path / "run"
    run = Run(folder)
    assert not folder.exists(), "to look at a run makes nothing"
    assert (run.exists(), run.has_begun(), run.is_finished(), run.metrics()) == (False, False, False, [])
    with pytest.raises(TrainingError, match="neither a model's folder"):
        SavedModel(folder)

    trainer = Trainer(recall_run(), folder)
    assert (run.exists(), run.has_begun()) == (True, False)
    with pytest.raises(TrainingError, match="another process is training"):
        Run(folder).claim(recall_run())
    trainer.train_step()
    trainer.save()
    trainer.close()
    assert (run.has_begun(), run.is_finished()) == (True, False)
    (folder / "run.json").unlink()
    assert run.exists(), "a checkpoint has the configuration too"
    assert run.config() == run.written_config() == recall_run()
    saved = SavedModel(folder)
    assert caplog.messages == [], "it is only said when it is used"
    for name, x in trainer.model.state_dict().items():
        assert torch.equal(saved.load().state_dict()[name], x), name
    assert saved.config().to_dict() == trainer.model.config.to_dict()
    assert caplog.messages[-1] == f"{folder} is not finished: the model is that of the checkpoint after step 1"

    export = Trainer(recall_run(), folder).run()
    assert export == run.export
    assert run.is_finished()
    assert run.metrics()[-1]["step"] == STEPS
    assert [one and one.folder for one in map(Run.around, (export, folder))] == [folder, folder]
    assert Run.around(tmp_path / "elsewhere") is None
    for path in (folder, export):
        assert SavedModel(path).folder == export


def test_a_run_starts_from_an_unfinished_one(tmp_path: Path) -> None:
    first = Trainer(recall_run(), tmp_path / "first")
    for _ in range(2):
        first.train_step()
    first.save()
    first.close()
    second = Trainer(recall_run(seed=1, init_from=tmp_path / "first"), tmp_path / "second")
    second.close()
    for name, x in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], x), name
