"""Statistics of studies, verdicts of claims, and a study from its runs to its page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from reproduce.made import losses, study_results
from sdm.errors import UserError
from sdm.evaluation.position import Position, growth, stretch
from sdm.evaluation.speed import Speed
from sdm.evaluation.statistics import Difference, weighted_mean
from sdm.reproduce.exhibits import loss_claim
from sdm.reproduce.jobs import Outcome, study_lock
from sdm.reproduce.run_study import run_study, study_page
from sdm.reproduce.sections.loss import Comparison, position_section
from sdm.reproduce.sections.memory import cost_section
from sdm.reproduce.study import NOT_REPORTED, RULE, Claim, Expected, Section, Study, Variant, by_seed, combined, shown
from sdm.run.config import ScheduleConfig, TrainConfig
from training.runs import text_run

TINY = Position(gain=False, first_bin=16)


def variant(name: str, seeds: int = 1) -> Variant:
    """A model that is never trained."""
    return Variant(f"{name}-{{seed}}", name.upper(), lambda seed: TrainConfig(), {"position": TINY}, seeds)


SDM, GDN = variant("sdm", 3), variant("gdn", 3)


def test_a_claim_without_an_interval_is_unclear() -> None:
    seed = Difference.over_seeds([0.5])
    assert seed is not None
    claim = Claim("x", "y", lambda results: seed, "above")
    assert claim.in_words(seed) == "+0.500 (no interval: 1 seed)"
    assert claim.verdict(seed) == "unclear"


@pytest.mark.parametrize(
    ("expected", "low", "high", "verdict"),
    [
        ("below", -2.0, -1.0, "agrees"),
        ("below", 1.0, 2.0, "differs"),
        ("below", -1.0, 1.0, "unclear"),
        ("above", 1.0, 2.0, "agrees"),
        ("above", -2.0, -1.0, "differs"),
        ("above", -1.0, 1.0, "unclear"),
        ("zero", -1.0, 1.0, "agrees"),
        ("zero", 1.0, 2.0, "differs"),
        ("zero", None, None, "unclear"),
        ("below", None, None, "unclear"),
    ],
)
def test_verdicts(expected: Expected, low: float | None, high: float | None, verdict: str) -> None:
    middle = 0.0 if low is None or high is None else (low + high) / 2
    claim = Claim("x", "y", lambda results: None, expected)
    assert claim.verdict(Difference(middle, low, high, "95% interval over 2 seeds")) == verdict
    assert claim.verdict(None) == "missing"
    unreported = replace(claim, paper=NOT_REPORTED)
    assert unreported.verdict(Difference(middle, low, high, "95% interval over 2 seeds")) == "measured"
    assert unreported.verdict(None) == "missing"


def test_several_verdicts() -> None:
    assert combined(["agrees", "agrees"]) == "agrees"
    assert combined(["agrees", "agrees"], ["a seed"]) == "unclear"
    assert combined(["agrees", "unclear"]) == combined(["agrees", "missing"]) == "unclear"
    assert combined(["agrees", "differs", "missing"]) == "differs"
    assert combined(["missing", "missing"]) == "missing"
    assert combined([]) == combined(["measured", "measured"]) == combined(["measured", "missing"]) == "measured"
    assert combined(["measured", "agrees"]) == "agrees"


def test_means_for_tables() -> None:
    assert shown(None) == "missing"
    assert shown(weighted_mean([1.0])) == "1.000"
    assert shown(weighted_mean([0.9, 1.1]), 1, sign=True) == "+1.0 ± 1.3"
    assert shown(weighted_mean([0.5]), 1, percent=True) == "50.0%"


def made_outcomes(seeds: int = 3) -> dict[str, Outcome]:
    """SDM is 0.1 below GDN in the first half of each document and 0.3 below in the second."""
    found = {}
    for seed in range(seeds):
        documents = {f"d{n}": (3.0 + n + seed / 10, 2.0 + n) for n in range(4)}
        found[GDN.run_name(seed)] = losses("gdn", documents)
        noise = {key: n / 100 for n, key in enumerate(documents)}
        found[SDM.run_name(seed)] = losses(
            "sdm", {key: (a - 0.1, b - 0.3 - noise[key]) for key, (a, b) in documents.items()}
        )
    return found


def test_losses_are_paired_by_document_and_seed() -> None:
    results = study_results(made_outcomes())
    late, grown = results.paired(SDM, GDN, stretch(-1)), results.paired(SDM, GDN, growth)
    assert late is not None
    assert grown is not None
    assert late.value == pytest.approx(-0.315)
    assert grown.value == pytest.approx(-0.215)
    assert late.by_seed == pytest.approx((-0.315,) * 3)
    whole = results.paired(SDM, GDN)
    assert whole is not None
    assert whole.value == pytest.approx(-0.2075)


def test_what_a_section_says() -> None:
    """Every claim has its quantity, its interval, its verdict and its rule; runs that are missing leave it open."""
    section = position_section(Section("code", "Code", "Text.", "Paper."), SDM, (GDN,))
    study = Study("test", "Test", "Lead.", {"all": [SDM, GDN]}, (section,))
    page = study_page(study, study_results(made_outcomes()))
    (finding,) = page.findings
    assert finding.verdict == "agrees"
    assert "SDM - GDN, nats per token in the second half of the documents: -0.315 (95% interval -0.3" in finding.found
    assert "over documents; 4 documents, 3 seeds" in finding.found
    rows = finding.tables[0].rows
    assert [row[1:] for row in rows] == [
        ("-0.028 over all positions at 1.4B", "below", "agrees"),
        ("the advantage grows substantially at 32k to 512k tokens", "below", "agrees"),
    ]
    assert finding.tables[0].caption == RULE
    assert "3 of 3 seeds" not in finding.why
    assert "6 of 6 runs are finished" in page.lead
    (open_finding,) = study_page(study, study_results(made_outcomes(2), [SDM, GDN])).findings
    assert open_finding.verdict == "unclear"
    assert "sdm-0: 2 of 3 seeds" in open_finding.why
    (missing,) = study_page(study, study_results({}, [SDM, GDN])).findings
    assert (missing.verdict, missing.found) == ("missing", "not measured yet")


def small_study(folder: Path, broken: bool = False) -> Study:
    """Two models that train in a second."""

    def model(layer: str, sources: tuple[str, ...] | None = None) -> Variant:
        def recipe(seed: int) -> TrainConfig:
            config = text_run(folder, "rows", schedule=ScheduleConfig(steps=4, warmup=1), seed=seed)
            fields = replace(config.model, layer_types=("sliding_attention", layer))
            data = config.data if sources is None else replace(config.data, sources=sources)
            return replace(config, model=fields, data=data)

        return Variant(f"{layer}-{{seed}}", layer, recipe, {"position": TINY}, 2)

    sdm = model("sdm")
    gdn = model("gdn", (str(folder / "nowhere"),) if broken else None)
    speed = Speed(lengths=(16, 32), repeats=1, new_tokens=2)
    models = {"sdm": sdm, "gdn": gdn, "full_attention": gdn}
    sections = (
        Comparison("loss", "Loss", "Text.", "Paper.", claims=[loss_claim(sdm, gdn, "-1")], variants=(sdm, gdn)),
        cost_section((), models, speed),
    )
    return Study("small", "Small", "Lead.", {"all": [sdm, gdn]}, sections, [sdm, gdn], speed, round_of=by_seed)


def test_a_study_from_its_runs_to_its_page(tmp_path: Path) -> None:
    """A run that fails is shown with its log beside the others; the same call makes it good; nothing is done twice."""
    output = tmp_path / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdm.reproduce.run_study.prepare_corpora", lambda jobs: None)
        failed = run_study(small_study(tmp_path, broken=True), output, 2)
    with pytest.raises(UserError, match="2 of 4 failed: gdn-0, gdn-1"):
        failed.check()
    assert "nowhere" in failed.path.read_text(), "the end of the log"
    trained = {path: path.stat().st_mtime_ns for path in output.glob("sdm-*/checkpoints/*")}
    assert trained

    report = run_study(small_study(tmp_path), output, 2)
    report.check()
    assert trained == {path: path.stat().st_mtime_ns for path in output.glob("sdm-*/checkpoints/*")}
    findings = {finding.key: finding for finding in report.page.findings}
    assert findings.keys() == {"loss", "cost"}
    assert findings["cost"].tables[0].title == "Compared with the paper"
    content = json.loads((output / "results.json").read_text())
    assert content["runs"]["sdm-0"]["facts"]["steps"] == 4
    assert content["runs"]["gdn-1"]["measured"]["position"]["nll"] > 0

    before = {path: path.stat().st_mtime_ns for path in output.glob("*/*.json")}
    again = run_study(small_study(tmp_path), output, report_only=True)
    assert [finding.found for finding in again.page.findings] == [finding.found for finding in report.page.findings]
    assert before == {path: path.stat().st_mtime_ns for path in output.glob("*/*.json")}
    with study_lock(output), pytest.raises(UserError, match="another `sdm reproduce`"):
        run_study(small_study(tmp_path), output, report_only=True)
    with pytest.raises(UserError, match="--output"):
        run_study(small_study(tmp_path), tmp_path / "none", report_only=True)
