"""Outcomes of runs that were never trained, for tests of what is said about them; and studies that run in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdm.evaluation.results import Results
from sdm.reproduce.jobs import Outcome, RunFacts
from sdm.reproduce.run_study import run_study
from sdm.reproduce.study import Study, StudyResults, Variant

FACTS: dict[str, Any] = {
    "parameters": 1000,
    "initial_state_parameters": 300,
    "state_elements": 64,
    "flops_per_token": 100,
    "steps": 10,
    "lr": 1e-3,
    "seconds": 1.0,
    "valid_loss": 1.0,
}
EDGES = [0, 64, 128]


def outcome(
    name: str, summaries: Mapping[str, dict[str, Any]], units: Mapping[str, dict[str, Any]] | None = None, **facts: Any
) -> Outcome:
    """A run with the summaries of its measurements; `units` are those of "position"."""
    results = {
        key: Results(key, {}, {}, {}, summary=summary, complete=True, units=dict(units or {}))
        for key, summary in summaries.items()
    }
    return Outcome(Path(name), RunFacts(**FACTS | facts), results)


def losses(name: str, documents: Mapping[str, Sequence[float]], **facts: Any) -> Outcome:
    """A run with the nats per token of each document, in the first and in the second half."""
    units = {key: {"edges": EDGES, "nll": [64 * early, 64 * late]} for key, (early, late) in documents.items()}
    count = len(documents)
    means = [sum(pair[place] for pair in documents.values()) / count for place in (0, 1)]
    positions = [
        {"start": start, "stop": stop, "nll": mean}
        for start, stop, mean in zip(EDGES[:-1], EDGES[1:], means, strict=True)
    ]
    summary = {"nll": sum(means) / 2, "positions": positions, "documents": count, "tokens": 128 * count}
    return outcome(name, {"position": summary}, units, **facts)


def study_results(outcomes: Mapping[str, Outcome], variants: Sequence[Variant] = ()) -> StudyResults:
    """Results of a study; the runs of `variants` that have no outcome are missing."""
    names = [variant.run_name(seed) for variant in variants for seed in range(variant.seeds)]
    return StudyResults(Path("nowhere"), {}, {name: Outcome(Path(name)) for name in names} | dict(outcomes))


def small(variant: Variant, **data: Any) -> Variant:
    """Two steps on few short rows."""
    config = variant.recipe(0)
    data = {"batch_size": 2, **data}
    short = replace(
        config, data=replace(config.data, **data), schedule=replace(config.schedule, steps=2, warmup=0, decay=1)
    )
    return replace(variant, recipe=lambda seed: replace(short, seed=seed), seeds=1)


def run_twice(study: Study, folder: Path) -> None:
    """The second time nothing is left to do."""
    for _ in range(2):
        report = run_study(study, folder, 1)
        report.check()
    assert f"{report.runs} of {report.runs} runs are finished" in report.page.lead
