"""The page of a study from results that were made by hand: what is missing, failed or cannot be shown is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from reproduce.made import losses, outcome, study_results
from sdm.analysis.pages import Page
from sdm.errors import UserError
from sdm.evaluation.position import Position
from sdm.evaluation.report import Chart, Point, Table
from sdm.evaluation.statistics import Difference
from sdm.reproduce.jobs import Outcome
from sdm.reproduce.run_study import StudyReport, _as_json, run_study, study_page
from sdm.reproduce.study import Claim, Exhibit, Section, Study, StudyResults, Variant
from sdm.run.config import OptimConfig, ScheduleConfig, TrainConfig


def variant(name: str, seeds: int = 2) -> Variant:
    """A model that is never trained, with 7 steps at a rate of 0.25."""
    config = TrainConfig(schedule=ScheduleConfig(steps=7), optim=OptimConfig(lr=0.25))
    return Variant(f"{name}-{{seed}}", name.upper(), lambda seed: config, {"position": Position()}, seeds)


A, B = variant("a"), variant("b", 1)
DIFFERENCE = Difference(-0.5, -0.75, -0.25, "95% interval over 2 seeds", (-0.4, -0.6))


def study(*sections: Section) -> Study:
    return Study("test", "Test", "Lead.", {"both": [A, B], "one": [A]}, sections)


def page_of(*sections: Section, failures: dict[str, str] | None = None) -> Page:
    """The page if the first seeds are trained, and the second seed of A is not."""
    made = {name: outcome(name, {"position": {"nll": 1.0}}, seconds=30.0) for name in ("a-0", "b-0")}
    results = study_results(made, [A, B])
    return study_page(study(*sections), replace(results, failures=failures or {}))


def section(
    key: str = "loss",
    exhibit: Callable[[StudyResults], Exhibit] = lambda results: Exhibit(),
    claims: tuple[Claim, ...] = (),
    variants: tuple[Variant, ...] = (B,),
) -> Section:
    return Section(key, key.title(), "Text.", "Paper.", ("deviation", f"of {key}"), "Why.", exhibit, claims, variants)


def raising(error: Exception) -> Callable[[StudyResults], Exhibit]:
    def exhibit(results: StudyResults) -> Exhibit:
        raise error

    return exhibit


def test_what_the_page_says_of_its_runs() -> None:
    page = page_of(section(), section("cost"), failures={"a-1": "line\nout of memory"})
    assert "2 of 3 runs are finished, 1 failed. Of 2 findings 0 agree" in page.lead
    tables = {part.title: part.tables[0].rows for part in page.sections if part.tables}
    assert tables["Runs of each experiment"] == [("both", "3", "2", "1", "1.0"), ("one", "2", "1", "1", "0.5")]
    assert tables["Runs"] == [
        ("a-0", "1,000", "7", "0.25", "0", "30", "done"),
        ("b-0", "1,000", "7", "0.25", "0", "30", "done"),
        ("a-1", "", "7", "0.25", "1", "", "missing"),
    ]
    deviations = next(part for part in page.sections if part.title == "Deviations from the paper")
    assert deviations.paragraphs == ("deviation", "of loss", "of cost"), "each once"
    failed = page.findings[-1]
    assert (failed.key, failed.verdict, failed.why) == ("failed", "failed", "a-1:\nline\nout of memory")
    assert "sdm reproduce test --output nowhere" in page.sections[-1].preformatted


@pytest.mark.parametrize(
    ("error", "verdict", "why"),
    [
        (ImportError("lm_eval is not installed"), "missing", "lm_eval is not installed. Install it, and the same"),
        (UserError("the run has no test documents"), "failed", "the run has no test documents"),
    ],
)
def test_a_section_that_cannot_be_made_leaves_the_others(error: Exception, verdict: str, why: str) -> None:
    broken, other = page_of(section("broken", raising(error)), section("other")).findings
    assert (broken.verdict, broken.found) == (verdict, "not measured")
    assert broken.why.startswith(why)
    assert other.verdict == "missing", "nothing to show and nothing to compare"
    with pytest.raises(ZeroDivisionError):
        page_of(section("mistake", raising(ZeroDivisionError())))


def test_claims_come_first_and_empty_tables_and_charts_are_left_out() -> None:
    full, empty = Table("full", ("a",), [("1",)]), Table("empty", ("a",), [])
    charts = [(Chart(name, "", "", "", {"A": points}), name) for name, points in (("c", [Point(1, 2)]), ("d", []))]
    exhibit = Exhibit([full, empty], charts, ("note",), "summary")
    claims = (
        Claim("known", "-1", lambda results: DIFFERENCE),
        Claim("unknown", "-2", lambda results: None),
    )
    (finding,) = page_of(section("loss", lambda results: exhibit, claims)).findings
    compared, shown = finding.tables
    assert compared.rows == [
        ("known: -0.500 (95% interval -0.750 to -0.250 over 2 seeds)", "-1", "below", "agrees"),
        ("unknown: not measured yet", "-2", "below", "missing"),
    ]
    assert shown is full
    assert [picture.name for picture in finding.illustrations] == ["c"]
    assert finding.found == f"summary; {compared.rows[0][0]}"
    assert (finding.verdict, finding.why, finding.notes) == ("unclear", "Why.", ("note",))
    (without,) = page_of(section("loss", lambda results: exhibit)).findings
    assert (without.verdict, without.found) == ("measured", "summary")


def test_seeds_that_are_missing_leave_a_claim_open() -> None:
    claim = Claim("known", "-1", lambda results: DIFFERENCE)
    (complete,) = page_of(section(claims=(claim,))).findings
    assert (complete.verdict, complete.why) == ("agrees", ""), "why a number differs is said where it does"
    (incomplete,) = page_of(section(claims=(claim,), variants=(A, B)), failures={"a-1": "log"}).findings[:1]
    assert incomplete.verdict == "unclear"
    assert incomplete.why == "Not finished: a-0: 1 of 2 seeds, 1 failed. Why."


def test_only_some_experiments() -> None:
    made = study(section(), section("cost", variants=(A,)))
    assert [(variant.name, seed) for variant, seed in made.runs(["one"])] == [("a-{seed}", 0), ("a-{seed}", 1)]
    assert made.runs(["one", "both"]) == made.runs()
    with pytest.raises(UserError, match="--only names experiments of this study: 'both', 'one'; got 'none'"):
        made.runs(["one", "none"])
    chart = Chart("chart", "Chart", "x", "y", {"curve": [Point(1.0, 1.0)]})
    shown = section("shown", lambda results: Exhibit(charts=[(chart, "")], summary="measured"))
    results = study_results({"b-0": outcome("b-0", {"position": {"nll": 1.0}})}, [A, B])
    whole = study_page(study(shown, section("cost", variants=(A,))), results)
    part = study_page(study(shown, section("cost", variants=(A,))), results, only=["both"])
    assert [finding.key for finding in whole.findings] == ["shown", "cost"]
    assert [finding.key for finding in part.findings] == ["shown"], "what is not asked for is not missed"


def test_results_as_json() -> None:
    page = page_of(section())
    run = replace(losses("a-0", {"d": (1.0, 2.0)}), failure="log")
    content = json.loads(json.dumps(_as_json(page, {"a-0": run, "a-1": Outcome(Path("a-1"))})))
    assert content["findings"][0]["key"] == "loss"
    assert content["runs"]["a-0"]["facts"]["parameters"] == 1000
    assert content["runs"]["a-0"]["measured"]["position"]["nll"] == 1.5
    assert content["runs"]["a-0"]["failure"] == "log"
    assert content["runs"]["a-1"] == {"facts": None, "measured": {}, "failure": None}


def test_failures_are_remembered_for_a_page_that_is_written_later(tmp_path: Path) -> None:
    (tmp_path / "failures.json").write_text('{"a-1": "the end of its log"}')
    report = run_study(study(section()), tmp_path, report_only=True)
    assert "the end of its log" in report.path.read_text()
    with pytest.raises(UserError, match=r"1 of 3 failed: a-1; .*report\.html has their logs"):
        report.check()
    (tmp_path / "failures.json").write_text("{")
    run_study(study(section()), tmp_path, report_only=True).check()


def test_a_finding_that_failed_is_an_error_without_failed_runs(tmp_path: Path) -> None:
    report = StudyReport(page_of(section("broken", raising(UserError("no")))), tmp_path, ["Broken"], 3)
    with pytest.raises(UserError, match="1 of 3 failed: Broken"):
        report.check()
