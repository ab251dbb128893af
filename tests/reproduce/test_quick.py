"""`sdm reproduce quick` from its jobs to its page, with models that train in a second."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sdm.data.config import CorpusConfig
from sdm.errors import UserError
from sdm.evaluation.position import Position
from sdm.evaluation.recall import Recall
from sdm.evaluation.speed import Speed
from sdm.reproduce.jobs import Job, Outcome, run_jobs
from sdm.reproduce.studies import quick
from sdm.reproduce.studies.quick import cost, recall
from sdm.reproduce.studies.quick.jobs import GDN_RATE, GDN_RATES, SEEDS, quick_jobs, recall_gdn, recall_sdm
from training.runs import text_run


def tiny(job: Job, folder: Path) -> Job:
    """The same job, smaller in every way that its findings do not depend on."""
    model = replace(job.config.model, hidden_size=16, intermediate_size=16, num_attention_heads=1, num_slots=16)
    model = replace(model, num_writes=4, num_reads=4, recurrent_key_dim=8)
    config = replace(job.config, model=model, schedule=replace(job.config.schedule, steps=2, warmup=1, decay=1))
    config = replace(config, monitor=replace(config.monitor, log_every=1, memory_every=1))
    if isinstance(config.data, CorpusConfig):
        data = text_run(folder, "rows").data
        return Job(job.name, replace(config, data=data), {"position": Position(gain=False, first_bin=16)})
    data = replace(config.data, num_pairs=4, start_pairs=2)
    return Job(job.name, replace(config, data=data), {"recall": Recall(sizes=(16, 256), rows=1)})


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails is shown with its log, beside what is made of the others; the same command makes it good."""
    monkeypatch.setattr(cost, "MEASUREMENT", Speed(lengths=(16, 32), repeats=1, new_tokens=2))
    jobs = [tiny(job, tmp_path) for job in quick_jobs()]
    good = next(job for job in jobs if job.name == "code-gdn-1x32")
    missing = replace(good.config, data=replace(good.config.data, sources=(str(tmp_path / "nowhere"),)))
    broken = [replace(job, config=missing) if job is good else job for job in jobs]
    output = tmp_path / "quick"
    monkeypatch.setattr(quick, "prepare_corpora", lambda *arguments: None)
    with pytest.raises(UserError, match=r"^1 of 19 failed: code-gdn-1x32; .*report\.html has their logs"):
        quick.reproduce(output, 2, Console(width=200), broken)
    page = (output / "report.html").read_text()
    assert "Runs that failed" in page
    assert "nowhere" in page
    printed = capsys.readouterr().out
    for text in ("K=256", "GDN, 1x64", "Not the paper's recipe", "W_q is initialised equal to W_k", "FAILED"):
        assert text in printed

    trained = {path: path.stat().st_mtime_ns for path in output.glob("*/checkpoints/*")}
    quick.reproduce(output, 2, Console(width=200), jobs)
    again = {path: path.stat().st_mtime_ns for path in output.glob("*/checkpoints/*")}
    assert again.items() > trained.items(), "only the run that failed is trained"
    page = (output / "report.html").read_text()
    assert "Runs that failed" not in page
    for text in (
        "A larger state at equal cost",
        "The plain recipe",
        "does not grow with the context",
        "the memory did",
    ):
        assert text in page
    figures = {path.name for path in (output / "figures").iterdir()}
    names = ("recall", "state", "code", "code-gap", "code-plain", "cost", "memory", "keys")
    assert figures == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert {path.stem for path in (output / "data").iterdir()} == set(names)
    content = json.loads((output / "results.json").read_text())
    assert [one["key"] for one in content["findings"]] == ["recall", "code", "code-plain", "cost", "memory"]
    assert all(one["deviations"] for one in content["findings"])


def outcomes(accuracies: dict[str, float], best_rate: float = GDN_RATE) -> dict[str, Outcome]:
    """As if the jobs of recall had been run."""
    found = {}
    for job in quick_jobs():
        if "recall" not in job.measurements:
            continue
        lr = job.config.optim.lr
        facts = {
            "parameters": 1000,
            "initial_state_parameters": 300,
            "state_elements": 64 * (job.config.model.num_slots if "sdm" in job.name else 64),
            "flops_per_token": 100,
            "lr": lr,
            "valid_loss": abs(lr - best_rate),
        }
        value = next((value for name, value in accuracies.items() if job.name.startswith(name)), 0.5)
        found[job.name] = Outcome(Path(job.name), facts, {"recall": {"accuracy": {"256": value}}})
    return found


def test_what_is_said_of_recall_follows_the_numbers() -> None:
    better = recall.finding(outcomes({"recall-sdm-1024": 0.99, "recall-gdn-1x64": 0.8}))
    assert better.verdict == "agrees"
    assert "SDM 99.0% (99.0 to 99.0), 3 seeds; GDN's best 80.0% (80.0 to 80.0), 3 seeds" in better.found
    assert any("is not at the edge of the sweep" in note for note in better.notes)
    assert any("Equal state, 4,096 numbers: SDM, N = 64 50.0%" in note for note in better.notes)
    assert any("+30%" in note for note in better.notes)
    one_seed = {recall_sdm(1024, 2): 0.7, "recall-sdm-1024": 0.99, "recall-gdn-1x64": 0.8}
    assert recall.finding(outcomes(one_seed)).verdict == "unclear"
    assert recall.finding(outcomes({"recall-sdm-1024": 0.7, "recall-gdn-1x64": 0.8})).verdict == "differs"


def test_a_rate_at_the_edge_of_the_sweep_is_said() -> None:
    found = recall.finding(outcomes({}, best_rate=GDN_RATES[-1]))
    assert any("the sweep should go on from there" in note for note in found.notes)


def test_without_the_runs_that_it_rests_on_there_is_no_result() -> None:
    failed = {name: Outcome(Path(name), failure="log") for name in outcomes({})}
    assert recall.finding(failed).verdict == "failed"
    some = outcomes({}) | {recall_gdn(16, GDN_RATE, 0): Outcome(Path("a"), failure="log")}
    assert recall.finding(some).verdict == "differs"


def test_jobs_of_quick() -> None:
    """The best rate may not be at the edge of the sweep, and GDN has at least the steps of SDM."""
    jobs = {job.name: job.config for job in quick_jobs()}
    assert len(jobs) == 19
    assert GDN_RATES[0] < GDN_RATE < GDN_RATES[-1]
    steps = {name: config.schedule.steps for name, config in jobs.items() if name.startswith("recall")}
    assert min(steps[name] for name in steps if "gdn" in name) >= max(steps[name] for name in steps if "sdm" in name)
    assert len({config.schedule.steps for name, config in jobs.items() if name.startswith("code")}) == 1


@pytest.mark.slow
def test_recall_at_256_pairs(tmp_path: Path) -> None:
    """The mean of three seeds."""
    jobs = [job for job in quick_jobs() if job.name in [recall_sdm(1024, seed) for seed in SEEDS]]
    accuracy = [one.measured["recall"]["accuracy"]["256"] for one in run_jobs(jobs, tmp_path, 2).values()]
    assert len(accuracy) == 3
    assert sum(accuracy) / 3 >= 0.97, accuracy
