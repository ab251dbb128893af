"""`sdm report`: a page about runs and results, whatever of them is there."""

from __future__ import annotations

import html
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import browser
from sdm.analysis.pages import Page
from sdm.analysis.pages.run_page import expand, runs_page
from sdm.cli import main
from sdm.errors import UserError
from sdm.files import read_checked_json, write_checked_json
from training.runs import text_run, train


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of SDM and one of GDN, both measured by nll, the first also by position."""
    folder = tmp_path_factory.mktemp("runs")
    config = text_run(folder / "text")
    train(config, folder / "sdm")
    kinds = ("sliding_attention", "gdn")
    train(replace(config, model=replace(config.model, layer_types=kinds)), folder / "gdn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDM_CACHE", str(tmp_path_factory.mktemp("cache")))
        main(["eval", "nll", str(folder / "sdm"), str(folder / "gdn")])
        main(["eval", "position", str(folder / "sdm"), "--length", "64", "--documents", "2"])
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    for name in ("sdm", "gdn"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def page_of(*paths: Path) -> Page:
    return runs_page([(path.name, path) for path in expand(paths)], "sdm report")


def verdicts(page: Page) -> dict[str, str]:
    return {finding.key: finding.verdict for finding in page.findings}


def test_everything_of_two_runs(folder: Path) -> None:
    page = page_of(folder)
    keys = {"training": "measured", "memory": "measured", "nll": "measured", "position": "measured"}
    assert verdicts(page) == keys | {"missing-position": "missing"}
    training, memory, nll, position, missing = page.findings
    assert [row[0] for row in training.tables[0].rows] == ["gdn", "sdm"]
    assert {row[0] for row in training.illustrations[0].rows} == {"gdn", "sdm"}
    assert {row[0] for row in memory.illustrations[0].rows} == {"sdm"}
    assert [table.title for table in nll.tables] == ["Likelihood of held-out text", "Paired differences"]
    assert re.fullmatch(r"gdn [\d.]+ \[[\d.]+, [\d.]+\], sdm [\d.]+ \[[\d.]+, [\d.]+\] nats/token", nll.found)
    assert position.illustrations
    assert "Settings: length = 64, documents = 2." in position.notes
    assert f"`sdm eval position {folder / 'gdn'}`" in missing.why
    assert [section.title for section in page.sections] == [
        *("Command", "Configuration: gdn", "Configuration: sdm", "Environment"),
    ]
    facts = dict(page.sections[-1].tables[0].rows)
    assert facts["cores"] == str(os.cpu_count())
    assert facts["torch"]


def test_a_run_that_has_just_begun_says_what_to_do(folder: Path) -> None:
    run = folder / "sdm"
    for name in ("metrics.jsonl", "evaluations", "export"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = page_of(run)
    assert verdicts(page) == {"training": "missing", "missing-nll": "missing"}
    assert page.findings[0].notes == (f"sdm: 0 of 8 steps; `sdm train {run}` trains the rest",)
    assert page.findings[1].why == f"`sdm eval nll {run}` measures it."


def test_results_alone(folder: Path) -> None:
    page = page_of(folder / "sdm" / "evaluations" / "nll")
    assert verdicts(page) == {"nll": "measured"}
    assert page.lead.startswith("Results; measured: nll.")


def test_damage_is_shown_and_hides_nothing_else(folder: Path) -> None:
    (folder / "sdm" / "evaluations" / "nll" / "results.json").write_text('{"measurement": ')
    file = folder / "gdn" / "evaluations" / "nll" / "results.json"
    write_checked_json(file, read_checked_json(file) | {"settings": {"unknown": 1}})
    (folder / "gdn" / "run.json").write_text("{")
    page = page_of(folder)
    assert verdicts(page)["position"] == "measured"
    faults = {finding.key: finding.why for finding in page.findings if finding.verdict == "failed"}
    assert faults.keys() == {"nll", "sdm"}
    assert "unknown" in faults["nll"]
    assert "is damaged" in faults["sdm"]


def test_absurd_metrics_are_named_and_the_rest_is_drawn(folder: Path) -> None:
    file = folder / "sdm" / "metrics.jsonl"
    text = f'{file.read_text()}{{"step": 9, "loss": 1e300, "seconds": {"9" * 400}}}\n{{"step": 1e999, "loss": 1.0}}\n'
    file.write_text(text + '{"step": 10, "loss": Infinity, "tokens_per_second": -1e-320}\n')
    page = page_of(folder / "sdm")
    assert verdicts(page)["training"] == "measured"
    (fault,) = [finding.why for finding in page.findings if finding.verdict == "failed"]
    assert fault == f"{file} has 2 numbers beyond 1e+30, which are not shown"
    main(["report", str(folder / "sdm")])
    words = (folder / "sdm" / "report" / "report.html").read_text()
    assert "could not be drawn" not in words
    assert "1e+300" not in words


def test_other_settings_are_not_put_side_by_side(folder: Path) -> None:
    file = folder / "gdn" / "evaluations" / "nll" / "results.json"
    content = read_checked_json(file)
    write_checked_json(file, content | {"settings": content["settings"] | {"context": 16}})
    found = [finding for finding in page_of(folder).findings if finding.key == "nll"]
    assert [finding.title for finding in found] == ["nll: gdn", "nll: sdm"]
    assert all("Paired differences" not in [table.title for table in finding.tables] for finding in found)


def test_the_command_writes_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(folder)])
    path = Path(capsys.readouterr().out.strip())
    assert path == folder / "report" / "report.html"
    words = html.unescape(path.read_text())
    assert f"sdm report {folder}" in words
    assert "Paired differences" in words
    main(["report", str(folder), "--output", str(folder / "other")])
    assert (folder / "other" / "figures" / "training.png").is_file()


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_of_runs_looks_right(folder: Path, tmp_path: Path, width: int) -> None:
    looks = Path(__file__).with_name("looks.js").read_text()
    main(["report", str(folder)])
    with browser.browser(tmp_path) as tab:
        tab.show_as(width)
        tab.open(folder / "report" / "report.html")
        tab.run("for (const one of document.querySelectorAll('details')) one.open = true")
        assert tab.run(looks, 11) == []
        assert tab.console() == []


def test_nothing_to_report(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")  # of somebody else
    with pytest.raises(UserError, match="is neither a run's folder nor one of results"):
        expand([tmp_path])
    with pytest.raises(SystemExit, match="is neither a run's folder"):
        main(["report", str(tmp_path / "nothing")])


def test_a_place_that_cannot_be_written_to_is_one_line(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(SystemExit, match=r"^error: cannot write the report into [^\n]+$"):
        main(["report", str(folder / "gdn"), "--output", str(folder / "file" / "page")])
