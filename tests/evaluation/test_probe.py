"""`sdm eval probe` and its short name `sdm probe`, called as a user calls them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli.test_commands import refusal
from sdm.cli import main
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.memory_access import probe_access, probe_reads
from sdm.evaluation.probe import Probe, probe_texts
from sdm.evaluation.results import read_results
from sdm.files import write_checked_json
from sdm.training import Trainer
from tiny_models import tiny_model
from training.runs import MODEL, recall_run, text_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run on text."""
    Trainer(text_run(tmp_path), tmp_path / "run").run()
    return tmp_path / "run"


def test_a_run_on_text(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement like the others: a table, results, figures; the numbers are those of the probe itself."""
    monkeypatch.setenv("COLUMNS", "80")
    capsys.readouterr()
    arguments = [str(run), "--split", "train", "--documents", "3", "--length", "100", "--formats", "png", "svg"]
    main(["eval", "probe", *arguments])
    printed = capsys.readouterr().out
    folder = run / "evaluations" / "probe"
    table = printed[: printed.index(str(folder))]
    assert max(map(len, table.splitlines())) <= 80
    words = " ".join(table.split())
    assert "Memory access of run" in words
    assert "There are not 3 documents of 8,192 tokens, the paper's choice: of 100" in words
    results = read_results(folder)
    assert results.complete
    assert results.data["sources"][0]["split"] == "train"
    summary = results.summary
    assert summary is not None
    assert summary["access"]["tokens"] == 300
    assert summary["documents"] == 3
    lm = open_model(run)
    texts = probe_texts(lm, Probe(split="train", documents=3, length=100))
    assert summary["access"] == json.loads(json.dumps(probe_access(lm.model, texts.rows).describe()))
    assert f"{summary['access']['read']['effective_mean']:.3f}" in table
    assert 0 < summary["memory"]["mean"]["slots_written"] <= 1
    assert "Reads and writes of run" in words
    assert summary["reads"] == json.loads(json.dumps(probe_reads(lm.model, texts.rows)))
    names = {f"{name}.{kind}" for name in ("cumulative_mass", "effective_keys", "reads") for kind in ("png", "svg")}
    assert {file.name for file in (folder / "figures").iterdir()} == names
    # The short name measures the same, and what is done is not done again.
    before = (folder / "results.json").read_text()
    monkeypatch.setattr("sdm.evaluation.probe.probe_access", lambda *_: pytest.fail("probed again"))
    main(["probe", *arguments])
    again = json.loads((folder / "results.json").read_text())
    assert again["units"] == json.loads(before)["units"]
    assert "Memory access of run" in capsys.readouterr().out


def test_the_page_of_a_run_shows_its_probe(run: Path, tmp_path: Path) -> None:
    main(["probe", str(run), "--split", "train", "--documents", "3", "--length", "100"])
    main(["report", str(run), "--output", str(tmp_path / "page")])
    page = next(iter(sorted(tmp_path.glob("page/**/*.html")))).read_text()
    assert "Memory access of run" in page
    # The same settings on other weights are another result, with a name of its own.
    results = read_results(run / "evaluations" / "probe")
    results.model["fingerprint"]["weights"] = "others"
    write_checked_json(run / "evaluations" / "probe" / "results.json", vars(results))
    main(["probe", str(run), "--split", "train", "--documents", "3", "--length", "100"])
    main(["report", str(run), "--output", str(tmp_path / "page")])
    page = next(iter(sorted(tmp_path.glob("page/**/*.html")))).read_text()
    assert "Memory access of run, probe-" in page


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
        summary = read_results(tmp_path / "out" / path.name).summary
        assert summary is not None
        assert summary["access"]["tokens"] == 6 * 12
        assert summary["access"]["write"]["keys"] == int(path.name[-1])
    assert (tmp_path / "out" / "figures" / "effective_keys.png").is_file()


def test_what_cannot_be_probed(run: Path, tmp_path: Path) -> None:
    output = ("--output", str(tmp_path / "out"), "--data", "code")
    tiny_model("gdn").save_pretrained(tmp_path / "gdn")
    assert "has no SDM layer, so there is no memory to probe" in refusal("probe", tmp_path / "gdn", *output)
    assert "--output: " in refusal("probe", tmp_path / "gdn")
    assert "name a model" in refusal("probe")
    assert "documents must be a positive integer, got 0" in refusal("probe", run, "--documents", "0")
    assert "length must be at least 2, got 1" in refusal("probe", run, "--length", "1")
    assert "nowhere" in refusal("probe", tmp_path / "nowhere", *output)
    assert f"{run} is given twice" in refusal("probe", run, run)
    (run / "evaluations").write_text("in the way")
    assert "cannot write into" in refusal("probe", run)
