"""Finished runs are extended: the decay moves, and nothing that was trained changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdm.cli import main
from sdm.data import RecallConfig
from sdm.errors import TrainingError
from sdm.run import Run
from sdm.run.config import CheckpointConfig, ScheduleConfig, TrainConfig
from sdm.training import Trainer
from training.runs import assert_same, recall_run, train

FLAT = RecallConfig(num_pairs=4, num_keys=8, num_values=4, batch_size=4, curriculum=False)


def steps(number: int, decay: int, warmup: int = 2, **sections: Any) -> TrainConfig:
    schedule = ScheduleConfig(steps=number, warmup=warmup, decay=decay)
    return recall_run(**({"data": FLAT, "schedule": schedule, "checkpoint": CheckpointConfig(every=100)} | sections))


@pytest.mark.parametrize("decay", [0, 3])
def test_an_extended_run_is_one_that_was_longer_from_the_start(tmp_path: Path, decay: int) -> None:
    expected = train(steps(12, 4), tmp_path / "whole")
    train(steps(8, decay), tmp_path / "run")
    store = Run(tmp_path / "run").checkpoints()
    assert store.steps() == ([5, 8] if decay else [8])
    assert_same(train(steps(12, 4), tmp_path / "run"), expected)
    assert store.steps() == [8, 12]
    losses = [[line["loss"] for line in Run(tmp_path / name).metrics()] for name in ("whole", "run")]
    assert losses[0] == losses[1]


def test_a_run_in_its_decay_goes_back_to_its_start(tmp_path: Path) -> None:
    expected = train(steps(12, 4), tmp_path / "whole")
    trainer = Trainer(steps(8, 3), tmp_path / "run")
    while trainer.step < 7:
        trainer.train_step()
        if trainer.step in (5, 7):
            trainer.save()
    trainer.close()
    assert_same(train(steps(12, 4), tmp_path / "run"), expected)


def test_a_branch_is_a_run_that_was_longer_from_the_start(tmp_path: Path) -> None:
    """The shorter run stays as it is: its last checkpoint and its export are those of its own decay."""
    expected = train(steps(12, 4), tmp_path / "whole")
    short, long = Run(tmp_path / "short"), Run(tmp_path / "long")
    end = train(steps(8, 3), short.folder)
    assert long.branch(short, steps(12, 4)) == 5
    assert [line["step"] for line in long.metrics()] == [2, 4]
    assert_same(train(steps(12, 4), long.folder), expected)
    assert_same(train(steps(8, 3), short.folder), end)
    losses = [[line["loss"] for line in Run(tmp_path / name).metrics()] for name in ("whole", "long")]
    assert losses[0] == losses[1]


def test_a_branch_needs_the_same_steps_and_a_new_folder(tmp_path: Path) -> None:
    short, long = Run(tmp_path / "short"), Run(tmp_path / "long")
    with pytest.raises(TrainingError, match="has no checkpoint to begin from"):
        long.branch(short, steps(12, 4))
    train(steps(8, 3), short.folder)
    with pytest.raises(TrainingError, match=r"schedule.warmup was 2 and is 3"):
        long.branch(short, steps(12, 4, warmup=3))
    assert not long.folder.exists()
    with pytest.raises(TrainingError, match="only a new one can branch off"):
        short.branch(short, steps(12, 4))


def test_the_start_of_the_decay_is_kept_beside_the_newest(tmp_path: Path) -> None:
    train(steps(12, 6, checkpoint=CheckpointConfig(every=2, keep=2)), tmp_path)
    assert Run(tmp_path).checkpoints().steps() == [6, 10, 12]


def test_refused_where_trained_steps_would_change(tmp_path: Path) -> None:
    train(steps(8, 3), tmp_path / "run")
    with pytest.raises(TrainingError, match=r"schedule.warmup was 2 and is 3"):
        Trainer(steps(12, 4, warmup=3), tmp_path / "run")
    with pytest.raises(TrainingError, match=r"schedule.steps was 8 and is 7"):
        Trainer(steps(7, 3), tmp_path / "run")
    run = Run(tmp_path / "run")
    run.checkpoints()._remove(5)
    with pytest.raises(TrainingError, match=r"began its decay after step 5, .*no checkpoint from before"):
        Trainer(steps(12, 4), tmp_path / "run")
    assert run.is_finished()


def test_refused_where_the_data_follows_the_steps(tmp_path: Path) -> None:
    data = replace(FLAT, curriculum=True, start_pairs=2)
    train(steps(8, 3, data=data), tmp_path)
    with pytest.raises(TrainingError, match=r"curriculum .*would have seen other batches"):
        Trainer(steps(12, 4, data=data), tmp_path).run()
    assert Run(tmp_path).checkpoints().steps() == [5, 8], "nothing is lost"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--extend STEPS` and `--schedule.steps` continue a finished run; the same command finds nothing to do."""
    folder = str(tmp_path / "run")
    train(steps(8, 2), tmp_path / "run")
    main(["train", folder])
    assert "finished after 8 steps, nothing to do" in capsys.readouterr().out
    main(["train", folder, "--extend", "12"])
    assert "sdm generate" in capsys.readouterr().out
    assert Run(tmp_path / "run").config().schedule == ScheduleConfig(steps=12, warmup=2, decay=3)
    main(["train", folder, "--extend", "12"])
    assert "finished after 12 steps, nothing to do" in capsys.readouterr().out
    main(["train", folder, "--schedule.steps", "16"])
    assert Run(tmp_path / "run").config().schedule == ScheduleConfig(steps=16, warmup=2, decay=3)
    with pytest.raises(SystemExit, match=r"extend: the run has 16 steps already, got 9"):
        main(["train", folder, "--extend", "9"])
    with pytest.raises(SystemExit, match=r"--extend: there is no run to extend"):
        main(["train", "recall", "--run-dir", str(tmp_path / "none"), "--extend", "9"])


def test_the_warmup_stays_when_a_recipe_gets_more_steps(tmp_path: Path) -> None:
    """A recipe derives its warmup from the number of steps; that of a run that has begun does not change."""
    arguments = ["train", "recall", "--run-dir", str(tmp_path), "--data.no-curriculum", "--data.batch-size", "2"]
    arguments += ["--data.num-pairs", "4", "--monitor.display", "none", "--monitor.validation-batches", "0"]
    main([*arguments, "--schedule.steps", "20"])
    before = Run(tmp_path).config().schedule
    main([*arguments, "--schedule.steps", "40"])
    after = Run(tmp_path).config().schedule
    assert (after.steps, after.warmup_steps) == (40, before.warmup_steps)
