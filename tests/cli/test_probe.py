"""`sdm probe`, called as a user calls it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli.test_commands import refusal
from sdm.cli import main
from sdm.training import Trainer
from tiny_models import tiny_model
from training.runs import MODEL, recall_run, text_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run on text."""
    Trainer(text_run(tmp_path), tmp_path / "run").run()
    return tmp_path / "run"


def test_a_run_on_text(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    capsys.readouterr()
    main(["probe", str(run), "--split", "train", "--documents", "3", "--length", "100"])
    printed = capsys.readouterr().out
    table = printed[: printed.index(str(run / "probe"))]
    assert max(map(len, table.splitlines())) <= 80
    words = " ".join(table.split())
    assert "Memory access of run" in words
    assert "There are not 3 documents of 8,192 tokens, the paper's choice: of 100" in words
    found = json.loads((run / "probe" / "probe.json").read_text())
    assert found["access"]["tokens"] == 300
    assert found["documents"] == 3
    assert found["data"]["sources"][0]["split"] == "train"
    assert 0.25 <= found["access"]["read"]["effective_mean"] <= 1
    assert f"{found['access']['read']['effective_mean']:.3f}" in table
    assert 0 < found["memory"]["mean"]["slots_written"] <= 1
    for name in ("cumulative_mass", "effective_keys"):
        for kind in ("png", "svg"):
            assert (run / "probe" / f"{name}.{kind}").stat().st_size > 3000


def test_short_documents(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer and shorter ones than were asked for are taken, and said."""
    main(["probe", str(run), "--split", "train", "--documents", "50"])
    words = " ".join(capsys.readouterr().out.split())
    assert "documents, not 50." in words
    assert "The longest documents there are: the shortest of them has" in words


def test_a_run_on_a_task_and_several_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for writes in (2, 4):
        runs.append(tmp_path / f"writes-{writes}")
        Trainer(recall_run(model=replace(MODEL, num_writes=writes)), runs[-1]).run()
    main(["probe", *map(str, runs), "--documents", "6", "--output", str(tmp_path / "out")])
    assert "Rows of the run's task, 12 tokens each" in " ".join(capsys.readouterr().out.split())
    for path in runs:
        found = json.loads((tmp_path / "out" / path.name / "probe.json").read_text())
        assert found["access"]["tokens"] == 6 * 12
        assert found["access"]["write"]["keys"] == int(path.name[-1])
    assert (tmp_path / "out" / "effective_keys.svg").is_file()


def test_what_cannot_be_probed(run: Path, tmp_path: Path) -> None:
    tiny_model("gdn").save_pretrained(tmp_path / "gdn")
    output = ["--output", str(tmp_path / "out"), "--data", "code"]
    assert "has no SDM layer, so there is no memory to probe" in refusal("probe", tmp_path / "gdn", *output)
    assert "--output: " in refusal("probe", tmp_path / "gdn")
    assert "name a run" in refusal("probe")
    assert "--documents must be at least 1, got 0" in refusal("probe", run, "--documents", "0")
    assert "--length must be at least 2, got 1" in refusal("probe", run, "--length", "1")
    assert "nowhere" in refusal("probe", tmp_path / "nowhere", *output)
    assert f"{run} is given twice" in refusal("probe", run, run)
    (run / "probe").write_text("in the way")
    assert "cannot write into" in refusal("probe", run)
