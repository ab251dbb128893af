"""`sdm eval`: tables, figures and results.json; what was stopped goes on; clear words for what cannot work."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation.conftest import other_model, save_model
from processes import stop
from sdm.cli import main
from sdm.evaluation.registry import MEASUREMENTS
from sdm.files import write_checked_json
from tiny_models import tiny_model
from training.runs import text_run, train


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, two models and texts, in the working directory."""
    monkeypatch.setenv("SDM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save_model(tiny_model(), tmp_path / "sdm")
    save_model(other_model("llama"), tmp_path / "llama")
    texts = tmp_path / "held-out"
    texts.mkdir()
    for number in range(5):
        (texts / f"{number}.txt").write_text(f"Text {number}. " + "some words, " * (3 + number))
    return tmp_path


def run_eval(*arguments: Any) -> None:
    main(["eval", *map(str, arguments)])


def refused(*arguments: Any) -> str:
    with pytest.raises(SystemExit) as info:
        run_eval(*arguments)
    return str(info.value)


def test_two_models(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables fit into 80 columns; the models are compared document by document; the same again measures nothing."""
    run_eval("nll", "sdm", "llama", "--data", "held-out", "--output", "out")
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert re.search(r"llama - sdm +nats/token +[+-]\d\.\d{4} +[+-]\d\.\d+ \.\.\. [+-]\d\.\d+ +5", said)
    results = json.loads((places / "out" / "sdm" / "results.json").read_text())
    assert results.keys() >= {"format", "measurement", "settings", "model", "data", "units", "summary", "complete"}
    assert results["complete"] is True
    assert results["versions"].keys() == {"sdm", "torch", "transformers", "python"}
    run_eval("nll", "sdm", "llama", "--data", "held-out", "--output", "out")
    assert json.loads((places / "out" / "sdm" / "results.json").read_text())["units"] == results["units"]
    capsys.readouterr()
    run_eval("compare", "out/sdm", "out/llama/results.json")
    assert "llama - sdm" in capsys.readouterr().out


def test_results_belong_to_the_run(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(text_run(places / "own"), places / "run")
    run_eval("position", "run", "--length", 40, "--documents", 3)
    assert "run/evaluations/position/results.json" in capsys.readouterr().out
    figures = places / "run" / "evaluations" / "position" / "figures"
    assert {file.name for file in figures.iterdir()} == {"position.png", "perplexity.png", "context-gain.png"}
    before = (figures.parent / "results.json").read_bytes()
    run_eval("position", "run", "--length", 41)
    said = capsys.readouterr()
    assert "run/evaluations/position holds results of other settings" in said.err
    assert "settings.length was 40 and is 41" in said.err
    beside = next(places.glob("run/evaluations/position-*"))
    assert f"run/evaluations/{beside.name}/results.json" in said.out
    assert (figures.parent / "results.json").read_bytes() == before
    assert (beside / "figures" / "position.png").is_file()


def test_five_models(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row per model, and differences to the first only, unless they are asked for."""
    names = ["sdm", "llama", "three", "four", "five"]
    for name in names[2:]:
        shutil.copytree("llama", name)
    arguments = ["position", *names, "--data", "held-out", "--length", "40", "--first-bin", "8", "--output", "out"]
    run_eval(*arguments)
    said = capsys.readouterr().out
    assert len(said.splitlines()) < 80
    pairs = set(re.findall(r"(\w+) - (\w+) ", said))
    assert pairs == {(name, "sdm") for name in names[1:]}
    assert len(re.findall(r"^ *sdm +\d\.\d{4}", said, re.MULTILINE)) == 1
    run_eval("compare", *(f"out/{name}" for name in names), "--baseline", "four", "--output", "compared")
    assert set(re.findall(r"(\w+) - (\w+) ", capsys.readouterr().out)) == {(x, "four") for x in names if x != "four"}
    run_eval("compare", *(f"out/{name}" for name in names), "--pairs", "all")
    assert len(set(re.findall(r"(\w+) - (\w+) ", capsys.readouterr().out))) == 10
    assert "--baseline: there is no model 'for'; did you mean four?" in refused(
        "compare", "out/sdm", "out/four", "--baseline", "for"
    )


def test_results_that_cannot_be_compared(places: Path) -> None:
    run_eval("nll", "sdm", "--data", "held-out", "--output", "nll")
    run_eval("position", "sdm", "--data", "held-out", "--length", 20, "--output", "position")
    message = refused("compare", "nll", "position")
    assert "cannot be compared: measurement is 'nll' for nll and 'position' for position" in message
    shutil.copytree("nll", "other")
    results = json.loads(Path("other/results.json").read_text())
    del results["sha256"]
    write_checked_json(Path("other/results.json"), results | {"units": {"a": 3}})
    assert "other/results.json is damaged: the result of a unit must be an object" in refused("compare", "nll", "other")
    write_checked_json(Path("other/results.json"), results | {"summary": {"sources": ["code"]}})
    assert "the content of these results is not that of sdm eval nll" in refused("compare", "nll", "other")
    write_checked_json(Path("other/results.json"), results | {"units": {key: {} for key in results["units"]}})
    assert "the content of these results is not that of sdm eval nll" in refused("compare", "nll", "other")


def test_limit(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_eval("nll", "sdm", "--data", "held-out", "--output", "out", "--limit", 2)
    said = capsys.readouterr().out
    assert "sdm: 2 of 5 documents or samples\nAs --limit 2 asks; without it the rest is measured." in said
    assert json.loads((places / "out" / "results.json").read_text())["complete"] is False
    run_eval("nll", "sdm", "--data", "held-out", "--output", "out")
    assert json.loads((places / "out" / "results.json").read_text())["complete"] is True


def test_what_cannot_be_measured(places: Path) -> None:
    assert "there is no measurement 'postion'; did you mean position?" in refused("postion", "sdm")
    assert "neither a run's folder nor a model's" in refused("nll", "nowhere", "--output", "out")
    assert "--output: 'sdm' is no run's folder" in refused("nll", "sdm", "--data", "held-out")
    assert "sdm is given twice" in refused("nll", "sdm", "./sdm", "--output", "out")
    twice = ("held-out", "code", "./held-out/../held-out")
    assert "--data names 'held-out' more than once" in refused("nll", "sdm", "--data", *twice, "--output", "out")
    assert "--limit must be at least 1, got 0" in refused("nll", "sdm", "--output", "o", "--limit", 0)
    assert "compare takes two results or more" in refused("compare", "sdm")
    assert "'sdm' holds no results" in refused("compare", "sdm", "llama")
    assert not (places / "out").exists()
    (places / "held-out" / "x.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    assert "x.jsonl, line 2 is not JSON" in refused("nll", "sdm", "--data", "held-out", "--output", "out")
    (places / "out").mkdir()
    (places / "out" / "thesis.txt").write_text("mine")
    assert "holds other files" in refused("nll", "sdm", "--data", "held-out/1.txt", "--output", "out")
    assert [file.name for file in (places / "out").iterdir()] == ["thesis.txt"]


def test_names_of_files_that_are_not_utf8(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        (places / "held-out" / os.fsdecode(b"\xe9.txt")).write_text("Text of a file with a name in Latin-1.")
    except OSError:
        pytest.skip("this file system takes no such names")
    run_eval("nll", "sdm", "--data", "held-out", "--output", "out-nll")
    run_eval("position", "sdm", "--data", "held-out", "--output", "out-position", "--length", 16)
    assert len(json.loads((places / "out-nll" / "results.json").read_text())["units"]) == 6


def test_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement is listed, and has a line for each of its settings, broken by nothing but the terminal."""
    monkeypatch.setenv("COLUMNS", "1000")
    run_eval()  # prints the listing that is stored
    listed = capsys.readouterr().out
    for name, kind in MEASUREMENTS.items():
        assert re.search(rf"^  {name} ", listed, re.MULTILINE), name
        assert refused(name, "--help") == "0"
        described = capsys.readouterr().out
        for field in dataclasses.fields(kind):
            assert f"--{field.name.replace('_', '-')}" in described, f"{name}: {field.name}"
        assert name != "position" or "for models of this library; others have no gain without it." in described


SLOW = """
import sys, time
from pathlib import Path
import sdm.evaluation.nll as nll
from sdm.cli import main
score = nll._Documents._score
def slow(self, rows, *rest):
    if Path("out/units-0.jsonl").exists() and Path("out/units-0.jsonl").stat().st_size:
        Path("begun").touch()
        time.sleep(60)
    return score(self, rows, *rest)
nll._Documents._score = slow
nll.DOCUMENTS = 1
main(["eval", "nll", "sdm", "--data", "held-out", "--output", "out"])
"""


def test_interrupted(places: Path) -> None:
    """Ctrl-C keeps what is done, and the same command goes on."""
    _, said = stop(["-c", SLOW], signal.SIGINT, (places / "begun").exists)
    assert said.splitlines()[-1] == "stopped: SIGINT; the same command continues"
    assert "Traceback" not in said
    partial = json.loads((places / "out" / "results.json").read_text())
    assert partial["complete"] is False
    assert len(partial["units"]) == 1
    assert not list((places / "out").glob("*.jsonl"))
    run_eval("nll", "sdm", "--data", "held-out", "--output", "out")
    complete = json.loads((places / "out" / "results.json").read_text())
    assert complete["complete"] is True
    assert partial["units"].items() <= complete["units"].items()


def test_ranks(places: Path) -> None:
    """Two processes measure what one does."""
    run_eval("nll", "sdm", "--data", "held-out", "--output", "one")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sdm"]
    command = [*launch, "eval", "nll", "sdm", "--data", "held-out", "--output", "two"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((places / name / "results.json").read_text()) for name in ("one", "two"))
    assert two["complete"] is True
    assert list(one["units"]) == list(two["units"])
    for key, result in one["units"].items():
        assert two["units"][key]["nll"] == pytest.approx(result["nll"], rel=1e-5)
    assert [file.name for file in (places / "two").iterdir()] == ["results.json"]
    assert done.stdout.count("Likelihood of held-out text") == 1
