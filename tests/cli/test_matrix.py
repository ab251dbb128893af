"""Every command against typos, missing files, wrong types, Ctrl-C, narrow windows and closed pipes.

No combination may end with a traceback, and no number of a table may be cut or broken.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sdm.cli import COMMANDS, main
from sdm.cli.eval_options import EvalOptions
from sdm.cli.train_options import TrainOptions
from training.runs import text_run, train

# A call of every command that works, on the files of `place`.
WORKING: dict[str, str] = {
    "train": "RUN",
    "tokenizer": "train PLACE/texts PLACE/bpe --vocab-size 260",
    "plot": "RUN --output PLACE/plot.png",
    "report": "RUN --output PLACE/report",
    "eval": "nll RUN --limit 2",
    "probe": "RUN --limit 2",
    "ruler": "byte PLACE/ruler.jsonl --samples 1 --lengths 1024 --tasks niah_single_1 --essays code",
    "scaling": "RUN PLACE/wide PLACE/wider --output PLACE/scaling --bootstrap 100 --loss train",
    "generate": "RUN --prompt memory --max-new-tokens 4 --state PLACE/made.sdm",
    "chat": "RUN --max-new-tokens 4",
    "export": "RUN --output PLACE/export",
    "info": "RUN",
    "trace": "RUN --prompt memory --output PLACE/trace.html --overwrite",
    "state": "show PLACE/state.sdm --model RUN",
    "reproduce": "paper --level 1 --output PLACE/paper --gpus 8",
    "ladder": "",
    "figure": "state-vs-flops --output PLACE/figure.png",
    "plan": "--gpus 8 --level 1 --batch-tokens 65536",
}
# The argument of the call above that names a file or a folder to read.
FILES = {
    **dict.fromkeys(("train", "plot", "report", "eval", "probe", "generate", "chat", "export", "info", "trace"), "RUN"),
    "tokenizer": "PLACE/texts",
    "ruler": "byte",
    "scaling": "PLACE/wide",
    "state": "PLACE/state.sdm",
}
# An option that takes a number, and that the command has.
NUMBERS = {
    "train": "--schedule.steps",
    "tokenizer": "--vocab-size",
    "eval": "--limit",
    "probe": "--limit",
    "ruler": "--samples",
    "scaling": "--bootstrap",
    "generate": "--max-new-tokens",
    "chat": "--max-new-tokens",
    "info": "--context",
    "trace": "--max-tokens",
    "reproduce": "--gpus",
    "plan": "--gpus",
}
TABLES = ("eval", "probe", "scaling", "info", "trace", "state", "ladder", "plan")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, two wider ones, texts and a state file."""
    folder = tmp_path_factory.mktemp("matrix")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDM_CACHE", str(folder / "cache"))
        config = text_run(folder)
        train(config, folder / "run")
        for name, width in (("wide", 32), ("wider", 48)):
            train(replace(config, model=replace(config.model, hidden_size=width)), folder / name)
        main(f"generate {folder}/run --prompt memory --max-new-tokens 2 --state {folder}/state.sdm".split())
    return folder


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing to read on standard input, and a working directory of its own."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("memory\n"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDM_CACHE", str(tmp_path / "cache"))


def call(command: str, place: Path, words: str | None = None) -> list[str]:
    text = WORKING[command] if words is None else words
    return [command, *text.replace("RUN", str(place / "run")).replace("PLACE", str(place)).split()]


def ending(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a call that must fail says; an exception other than SystemExit would be a traceback."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code not in (0, None)
    message = raised.value.code if isinstance(raised.value.code, str) else ""
    said = message + capsys.readouterr().err
    assert said.strip()
    assert "Traceback" not in said
    return said


def test_all_commands_are_here() -> None:
    assert list(WORKING) == list(COMMANDS)
    assert tuple(name for name in WORKING if name in TABLES) == TABLES


@pytest.mark.parametrize("command", WORKING)
def test_typo(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ending([*call(command, place), "--no-such-option", "1"], capsys)
    assert "no-such-option" in said
    assert command in ending([command[:-1] + "q"], capsys) or command == "state"  # offered, or as near as another


@pytest.mark.parametrize("command", FILES)
def test_missing_file(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = WORKING[command].replace(FILES[command], "PLACE/nowhere", 1)
    assert "nowhere" in ending(call(command, place, words), capsys)


@pytest.mark.parametrize("command", NUMBERS)
def test_wrong_type(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "many" in ending([*call(command, place), NUMBERS[command], "many"], capsys)


@pytest.mark.parametrize("command", [name for name in WORKING if name != "ladder"])  # prints a stored text
def test_interrupt(
    command: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the command runs. `test_interrupts.py` has processes that are interrupted at work."""
    kind = {"train": TrainOptions, "eval": EvalOptions, "probe": EvalOptions}.get(command, COMMANDS[command])
    monkeypatch.setattr(kind, "run", lambda self: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as raised:
        main(call(command, place))
    assert raised.value.code == 130
    assert capsys.readouterr().err.startswith("stopped: SIGINT")
    assert signal.getsignal(signal.SIGINT) is before


def numbers(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w./-])\d[\d,.]*(?:e-?\d+)?[%MBkG]?(?![\w/])", text))


@pytest.mark.parametrize("command", TABLES)
def test_narrow_windows(
    command: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers of a wide window are whole in a narrow one, and tables are not wider than it."""
    printed = {}
    for columns in (200, 80, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        main(call(command, place))
        printed[columns] = capsys.readouterr().out
        drawn = [line for line in printed[columns].splitlines() if "─" in line or "━" in line]
        assert not drawn or max(map(len, drawn)) <= columns
        assert "…" not in printed[columns]
    for columns in (80, 60):
        assert numbers(printed[200]) <= numbers(printed[columns])
        whole = [line for line in printed[columns].splitlines() if str(place) not in line]
        assert max(map(len, whole)) <= max(columns, 80)


@pytest.mark.parametrize("command", TABLES)
def test_json(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*call(command, place), "--json"])
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", WORKING)
def test_closed_pipe(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is gone, as behind `| head -1`, is no reason for a traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        with contextlib.suppress(SystemExit):
            main(call(command, place))


def test_help_fits_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert [line.split()[0] for line in printed.splitlines() if re.match(r"  [a-z]", line)] == list(COMMANDS)


@pytest.mark.parametrize("arguments", [["plot"], ["plot", "a", "--output", "x.doc"]])
def test_plot_refuses(arguments: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ending([str(place / "run") if word == "a" else word for word in arguments], capsys)


def test_plot_of_two_runs(place: Path, tmp_path: Path) -> None:
    """Loss, slots and gates of both, also where results of evaluations lie beside them."""
    from sdm.analysis.pages.run_page import run_plot

    main(["plot", str(place / "run"), str(place / "wide"), "--output", str(tmp_path / "both.svg")])
    assert (tmp_path / "both.svg").stat().st_size > 10_000
    grid = run_plot([("a", place / "run"), ("b", place / "wide")])
    assert [chart.name for chart in grid.charts] == [
        "training",
        *(f"memory-{name}" for name in ("slots-written", "slots-read", "forget_gate", "input_gate")),
    ]
    assert all({"a", "b"} <= set(chart.curves) for chart in grid.charts)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str, tmp_path: Path) -> None:
    with contextlib.suppress(SystemExit):
        main(["--tyro-write-completion", shell, str(tmp_path / "script")])
    script = (tmp_path / "script").read_text()
    assert all(command in script for command in COMMANDS)


def test_completion_of_another_shell_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("shtab") is not None:
        pytest.skip("shtab is installed, and serves it")
    assert "there are bash and zsh" in ending(["--tyro-write-completion", "tcsh", str(tmp_path / "script")], capsys)
