"""The study of `sdm reproduce quick`: its runs, and what it says about recall."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from reproduce.made import outcome, study_results
from sdm.analysis.pages import Finding
from sdm.cli import main
from sdm.data.config import CorpusConfig, RecallConfig
from sdm.evaluation.position import Position
from sdm.evaluation.recall import Recall
from sdm.evaluation.speed import Speed
from sdm.reproduce import quick
from sdm.reproduce.jobs import Outcome, run_jobs
from sdm.reproduce.quick import GDN_RATE, GDN_RATES, SLOTS, quick_study, recall_forms
from sdm.reproduce.run_study import study_page
from sdm.reproduce.study import Study, Variant
from sdm.run.config import TrainConfig
from training.runs import text_run


def tiny(variant: Variant, folder: Path) -> Variant:
    """The same variant, smaller in every way that its findings do not depend on."""

    def recipe(seed: int) -> TrainConfig:
        config = variant.recipe(seed)
        model = replace(config.model, hidden_size=16, intermediate_size=16, num_attention_heads=1, num_slots=16)
        model = replace(model, num_writes=4, num_reads=4, recurrent_key_dim=8)
        config = replace(config, model=model, schedule=replace(config.schedule, steps=2, warmup=1, decay=1))
        config = replace(config, monitor=replace(config.monitor, log_every=1, memory_every=1))
        if isinstance(config.data, CorpusConfig):
            return replace(config, data=text_run(folder, "rows").data)
        assert isinstance(config.data, RecallConfig)
        return replace(config, data=replace(config.data, num_pairs=4, start_pairs=2))

    return replace(variant, recipe=recipe)


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command to the page, with models that train in a second."""
    made = {name: getattr(quick, name)() for name in ("recall_forms", "code_variants")}
    forms = {
        kind: {label: {lr: tiny(one, tmp_path) for lr, one in rates.items()} for label, rates in group.items()}
        for kind, group in made["recall_forms"].items()
    }
    for measurements, small in (
        (quick.ACCURACY, {"recall": Recall(sizes=(16, 256), rows=1)}),
        (quick.LOSS, {"position": Position(gain=False, first_bin=16)}),
    ):
        for name, measurement in small.items():
            monkeypatch.setitem(measurements, name, measurement)
    monkeypatch.setattr(quick, "SPEED", Speed(lengths=(16, 32), repeats=1, new_tokens=2))
    monkeypatch.setattr(quick, "recall_forms", lambda: forms)
    code = {name: tiny(one, tmp_path) for name, one in made["code_variants"].items()}
    monkeypatch.setattr(quick, "code_variants", lambda: code)
    output = tmp_path / "quick"
    main(["reproduce", "quick", "--output", str(output)])
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("Not the paper's recipe:", "retrieved-sum rule", "W_q is initialised equal to W_k", "sdm generate"):
        assert text in printed
    page = (output / "report.html").read_text()
    for text in (
        "A larger state at equal cost",
        "plain recipe",
        "GDN is Gated DeltaNet",
        "if its whole interval",
    ):
        assert text in page
    for name in ("trace-recall-sdm-1024-seed0.html", "trace-code-sdm.html"):
        assert f'<a href="{name}">' in page
        assert "which tokens are read" in (output / name).read_text()
    figures = {path.name for path in (output / "figures").iterdir()}
    names = (
        *("recall", "state", "code", "code-gap", "code-plain", "code-plain-gap", "cost"),
        *("cumulative-mass", "effective-keys", "memory"),
    )
    assert figures == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert {path.stem for path in (output / "data").iterdir()} == set(names)
    content = json.loads((output / "results.json").read_text())
    keys = [finding["key"] for finding in content["findings"]]
    assert keys == ["recall", "code", "code-plain", "cost", "access", "memory"]
    assert all("retrieved-sum rule" in finding["deviations"][0] for finding in content["findings"])


def recall_finding(accuracies: dict[str, float], best_rate: float = GDN_RATE) -> Finding:
    """What is said if the models of recall had these accuracies at 256 pairs, by the beginning of the run's name."""
    study = quick_study()
    found: dict[str, Outcome] = {}
    for variant in study.groups["recall"]:
        for seed in range(variant.seeds):
            config, name = variant.recipe(seed), variant.run_name(seed)
            value = next((value for start, value in accuracies.items() if name.startswith(start)), 0.5)
            best = "sdm-1024" in name or "gdn-1x64" in name
            facts = {
                "state_elements": 64 * (config.model.num_slots if "sdm" in name else 64),
                "lr": config.optim.lr,
                "valid_loss": abs(config.optim.lr - best_rate) + (0 if best else 1),
            }
            summary = {"accuracy": {"256": value + seed / 1000}}
            found[name] = outcome(name, {"recall": summary}, **facts)
    recall = Study("quick", "", "", {"recall": study.groups["recall"]}, study.sections[:1])
    return study_page(recall, study_results(found)).findings[0]


def test_what_is_said_of_recall_follows_the_numbers() -> None:
    better = recall_finding({"recall-sdm-1024": 0.99, "recall-gdn-1x64": 0.8})
    assert better.verdict == "agrees"
    assert "SDM, N = 1,024 99.1 ± 0.2% (65,536 numbers of state)" in better.found
    assert "accuracy at 256 pairs (points): +19.0%" in better.found
    assert "over 3 seeds" in better.found
    assert any("At an equal state of 4,096 numbers: SDM, N = 64 50.0%" in note for note in better.notes)
    one_seed = {"recall-sdm-1024-seed2": 0.7, "recall-sdm-1024": 0.99, "recall-gdn-1x64": 0.8}
    assert recall_finding(one_seed).verdict == "unclear"
    assert recall_finding({"recall-sdm-1024": 0.7, "recall-gdn-1x64": 0.8}).verdict == "differs"


def test_a_rate_at_the_edge_of_the_sweep_is_said_and_has_no_interval() -> None:
    finding = recall_finding({"recall-sdm-1024": 0.99}, best_rate=GDN_RATES[-1])
    rows = {row[0]: row for table in finding.tables for row in table.rows if "Recall: accuracy" in table.title}
    assert rows["GDN, 1x64"][-3] == "0.006 (edge)"
    assert finding.verdict == "unclear"
    assert "no interval: 1 seed" in finding.found


def test_runs_of_quick() -> None:
    """The best rate may not be at the edge of the sweep, and GDN has at least the steps of SDM."""
    runs = {variant.run_name(seed): variant.recipe(seed) for variant, seed in quick_study().runs()}
    assert len(runs) == 19
    assert GDN_RATES[0] < GDN_RATE < GDN_RATES[-1]
    steps = {name: config.schedule.steps for name, config in runs.items() if name.startswith("recall")}
    assert min(steps[name] for name in steps if "gdn" in name) >= max(steps[name] for name in steps if "sdm" in name)
    assert len({config.schedule.steps for name, config in runs.items() if name.startswith("code")}) == 1


@pytest.mark.slow
def test_recall_at_256_pairs(tmp_path: Path) -> None:
    """The mean of three seeds."""
    (largest,) = recall_forms()["sdm"][f"SDM, N = {SLOTS[-1]:,}"].values()
    outcomes = run_jobs([largest.job(seed) for seed in range(3)], tmp_path, 2)
    accuracy = [run.measured["recall"]["accuracy"]["256"] for run in outcomes.values()]
    assert len(accuracy) == 3
    assert sum(accuracy) / 3 >= 0.97, accuracy
