"""`sdm train`: a recipe with the fields that the command line changes."""

from __future__ import annotations

import json
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from processes import stop
from sdm.cli import main
from sdm.cli.train_options import parse
from sdm.data.mad import TASKS, MADTask
from sdm.errors import TrainingError
from sdm.reproduce.recipes.registry import RECIPES, SHORT_NAMES, parameters, recipe
from sdm.run.config import ScheduleConfig
from sdm.run.config_file import from_json
from training.runs import text_run


@pytest.mark.parametrize("task", TASKS)
def test_tasks_of_mad(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--data.batch-size", "2", "--run-dir", str(tmp_path / "run")]
    main(["train", f"mad-{task}", "--schedule.steps", "2", *run])
    printed = capsys.readouterr().out
    assert "step 2/2" in printed
    main(shlex.split(printed.split("`")[-2].removeprefix("sdm ")))


def test_unknown_recipe() -> None:
    with pytest.raises(TrainingError, match="there is no recipe 'tiny'"):
        recipe("tiny")
    with pytest.raises(SystemExit, match="there is no recipe"):
        main(["train", "tiny"])
    with pytest.raises(SystemExit, match=r"the recipe comes first, got --optim\.lr"):
        main(["train", "--optim.lr", "1"])


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """On the standard output, within a narrow terminal, and asking for it is no error."""
    for arguments in (["train"], ["train", "--help"]):
        main(arguments)
        printed, complaint = capsys.readouterr()
        assert not complaint
        assert all(len(line) < 80 for line in printed.splitlines())
        shown = [line.split() for line in printed.splitlines()]
        for name in RECIPES:
            assert [name, *(f"--{option.replace('_', '-')}" for option in parameters(name))] in shown
        named = set(printed.replace(",", " ").split())
        assert named >= {*get_args(MADTask)}


@pytest.mark.parametrize("name", ["ladder-1", "ladder-8-gdn", "recall-gdn", "mqar-attention", "mad-memorization"])
def test_short_names(name: str) -> None:
    """They are a recipe with parameters, down to the folder of the run."""
    full, given = SHORT_NAMES[name]
    options = [text for option, value in given.items() for text in (f"--{option.replace('_', '-')}", str(value))]
    long, short = parse([full, *options]), parse([name])
    assert (long.config, long.run_dir) == (short.config, short.run_dir)
    assert short.config == recipe(name) == recipe(full, **given)
    assert short.run_dir == Path("runs") / name


def test_parameters_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe's parameters and the fields of the configuration stand beside each other, in any order."""
    expected = recipe("ladder", level=8, global_layer="gdn")
    options = ["--level", "8", "--global-layer", "gdn", "--optim.lr", "1e-3", "--schedule.steps", "50"]
    for place in range(0, len(options), 2):
        parsed = parse(["ladder", *options[place:], *options[:place]])
        assert parsed.run_dir == Path("runs/ladder-8-gdn")
        assert parsed.config == replace(
            expected, optim=replace(expected.optim, lr=1e-3), schedule=expected.schedule.scaled(50)
        )
    with pytest.raises(SystemExit, match="level must be one of 1, 2"):
        main(["train", "ladder", "--level", "7"])
    with pytest.raises(SystemExit):
        main(["train", "mad", "--task", "poetry"])
    assert "poetry" in "".join(capsys.readouterr())
    with pytest.raises(SystemExit) as asked:
        main(["train", "ladder", "--level", "8", "--help"])
    assert asked.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Level of the ladder: 1, 2, 3, 4, 5, 6, 8, 13." in printed
    assert "(default: 1920)" in printed, "the fields show what the parameters make of them"


@pytest.mark.parametrize("name", [*RECIPES, "ladder-8-gdn", "recall-gdn"])
def test_warmup_and_decay_follow_the_steps(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = recipe(name).schedule
    main(["train", name, "--schedule.steps", "60", "--print-config"])
    schedule = from_json(ScheduleConfig, json.loads(capsys.readouterr().out)["schedule"])
    for part in ("warmup_steps", "decay_steps"):
        assert abs(getattr(schedule, part) / 60 - getattr(whole, part) / whole.steps) < 1 / 60
    main(["train", name, "--schedule.steps=60", "--schedule.warmup=7", "--schedule.decay=2", "--print-config"])
    schedule = from_json(ScheduleConfig, json.loads(capsys.readouterr().out)["schedule"])
    assert (schedule.warmup, schedule.decay) == (7, 2)


def test_fields_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["tiny-code", "--optim.lr", "1e-4", "--data.sequence-length", "64", "--run-dir", "x"])
    assert options.config == replace(
        recipe("tiny-code"),
        optim=replace(recipe("tiny-code").optim, lr=1e-4),
        data=replace(recipe("tiny-code").data, sequence_length=64),
    )
    assert options.run_dir == Path("x")
    main(["train", "recall", "--print-config", "--seed", "3"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["seed"] == 3
    with pytest.raises(SystemExit, match=r"no option --optim\.learning-rate; did you mean --optim\.lr"):
        main(["train", "recall", "--optim.learning-rate", "1"])
    with pytest.raises(SystemExit):
        main(["train", "recall", "--optim.lr", "-1"])
    assert "optim.lr must be positive" in "".join(capsys.readouterr())


def test_train_export_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a folder of text to generated text, then on longer sequences from there."""
    text_run(tmp_path)
    fields = {
        "data.sources": tmp_path / "texts",
        "data.tokenizer": "byte",
        "data.cache-dir": tmp_path / "cache",
        "data.sequence-length": 32,
        "data.valid-fraction": 0.2,
        "model.hidden-size": 16,
        "model.num-slots": 16,
        "model.num-writes": 4,
        "model.num-reads": 4,
        "schedule.steps": 4,
        "compute.threads": 1,
        "run-dir": tmp_path / "run",
    }
    arguments = [part for name, value in fields.items() for part in (f"--{name}", str(value))]
    main(["train", "tiny-text", *arguments])
    printed = capsys.readouterr().out
    assert "step 4/4" in printed
    main([*shlex.split(printed.split("`")[-2].removeprefix("sdm ")), "--max-new-tokens", "3"])
    main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "again")])
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "run" / "export" / name).read_bytes()

    longer = ["--init-from", str(tmp_path / "run"), "--sequence-length", "64", "--run-dir", str(tmp_path / "long")]
    main(["train", "long-context", *longer, "--schedule.steps", "2"])
    resolved = json.loads((tmp_path / "long" / "run.json").read_text())
    assert resolved["data"]["sequence_length"] == 64
    assert resolved["compute"]["checkpointing"] == "segment"
    assert resolved["model"]["hidden_size"] == 16
    with pytest.raises(SystemExit, match="needs --init-from"):
        main(["train", "long-context"])
    with pytest.raises(SystemExit, match="neither a model's folder"):
        main(["train", "tiny-text", *arguments[:-1], str(tmp_path / "new"), "--init-from", str(tmp_path / "nothing")])


def test_wrong_tokenizer_is_refused(tmp_path: Path) -> None:
    text_run(tmp_path)
    sources = ["--data.sources", str(tmp_path / "texts"), "--data.cache-dir", str(tmp_path / "cache")]
    run = ["--run-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match="does not match the model"):
        main(["train", "tiny-text", *sources, "--data.tokenizer", "byte", "--model.vocab-size", "100", *run])


TOKENISING = """
import sys, time
import sdm.data.prepare as prepare
from sdm.cli import main
prepare._write_splits = lambda *arguments: time.sleep(60)
main(["train", *sys.argv[1:]])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_while_tokenising_leave_nothing(tmp_path: Path, number: signal.Signals) -> None:
    text_run(tmp_path)
    tokens, fields = tmp_path / "cache" / "tokens", ["--data.tokenizer", "byte", "--run-dir", str(tmp_path / "run")]
    fields += ["--data.sources", str(tmp_path / "texts"), "--data.cache-dir", str(tmp_path / "cache")]
    command = ["-c", TOKENISING, "tiny-text", *fields]
    _, said = stop(command, number, lambda: tokens.is_dir() and any(tokens.iterdir()))
    assert said.endswith(f"\nstopped: {number.name}; the same command continues\n")
    assert not any(tokens.iterdir())
