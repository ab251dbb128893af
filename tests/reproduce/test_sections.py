"""Sections of studies from results that were made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduce.made import losses, outcome, study_results
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.position import Position
from sdm.evaluation.results import Results
from sdm.evaluation.ruler.measurement import Ruler
from sdm.evaluation.speed import Speed, speed_curves
from sdm.reproduce.sections import memory
from sdm.reproduce.sections.loss import position_section
from sdm.reproduce.sections.memory import cost_section, utilisation_section
from sdm.reproduce.sections.recall import accuracy_section, task_accuracy
from sdm.reproduce.study import Section, Variant
from sdm.run.config import TrainConfig

ENDS = ("", "_low", "_high")
SECTION = Section("key", "Title", "Text.", "Paper.")


def variant(name: str, seeds: int = 1, **measurements: Measurement) -> Variant:
    """A model that is never trained."""
    asked = measurements or {"position": Position()}
    return Variant(f"{name}-{{seed}}", name, lambda seed: TrainConfig(), asked, seeds)


def test_sdm_is_compared_with_the_form_that_is_best_late_in_documents() -> None:
    """Over all positions the other form is better."""
    sdm, early, late, other = (variant(name) for name in ("SDM", "early", "late", "attention"))
    documents = {"SDM": (2.0, 2.0), "early": (1.0, 2.6), "late": (3.0, 2.5), "attention": (2.0, 3.0)}
    made = {
        f"{name}-0": losses(f"{name}-0", {f"d{n}": (first + n, second + n) for n in range(3)})
        for name, (first, second) in documents.items()
    }
    section = position_section(SECTION, sdm, (early, late), (other,))
    results = study_results(made)
    far, grown = (claim.difference(results) for claim in section.claims)
    assert far is not None
    assert grown is not None
    assert far.value == pytest.approx(-0.5)
    assert grown.value == pytest.approx(0.5)
    exhibit = section.show(results)
    assert exhibit.notes[-1].endswith("second half of these documents is late.")
    losses_table, above = exhibit.tables
    assert [row[0] for row in losses_table.rows] == ["SDM", "early", "late", "attention"]
    assert [row[0] for row in above.rows] == ["early", "late", "attention"]
    gap = next(chart for chart, _ in exhibit.charts if chart.name == "key-gap")
    assert {row[0] for row in gap.rows()} == {"late", "attention"}, "of GDN's forms the best alone"
    assert len(position_section(SECTION, sdm, (late,), grows=False).claims) == 1


def speed_rows(decode: float) -> list[dict[str, Any]]:
    spans = {"decode": (decode, 0.9 * decode, 1.1 * decode), "prefill": (1e-6,) * 3, "state": (8e6,) * 3}
    return [
        {"length": length}
        | {f"{key}{end}": number for key, values in spans.items() for end, number in zip(ENDS, values, strict=True)}
        for length in (16, 32)
    ]


def test_times_are_compared_behind_the_longest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {kind: variant(kind) for kind in ("sdm", "gdn", "full_attention")}
    times = {"sdm-0": 0.002, "gdn-0": 0.0019, "full_attention-0": 0.006}

    def stored(measurement: Speed, folder: Path) -> Results | None:
        summary = {"lengths": speed_rows(times[folder.parent.parent.name])}
        return Results("speed", {}, {}, {}, summary=summary, complete=True)

    monkeypatch.setattr(memory, "stored_results", stored)
    made = {name: outcome(name, {}) for name in times}
    section = cost_section((), models, Speed(lengths=(16, 32), repeats=3, new_tokens=2))
    attention, gdn = section.claims
    difference = attention.difference(study_results(made))
    assert difference is not None
    assert (difference.value, difference.low, difference.high) == pytest.approx((2.0, 3 * 9 / 11 - 1, 3 * 11 / 9 - 1))
    assert attention.verdict(difference) == "agrees"
    assert gdn.verdict(gdn.difference(study_results(made))) == "unclear", "the ranges of the repeats overlap"
    exhibit = section.show(study_results(made))
    assert exhibit.summary.startswith("behind 32 tokens: sdm 2.00 ms and 8.000 MB")
    assert len(exhibit.tables[0].rows) == 6
    missing = study_results({"sdm-0": made["sdm-0"]}, list(models.values()))
    assert attention.difference(missing) is None


def test_curves_of_speed_leave_out_what_was_not_measured() -> None:
    rows = [*speed_rows(0.002), {"length": 64, "decode": None, "decode_low": None, "decode_high": None}]
    (points,) = speed_curves("decode", {"SDM": rows}).values()
    assert [(point.x, point.y) for point in points] == [(16, 2.0), (32, 2.0)]


def test_the_memory_at_the_end_of_training(tmp_path: Path) -> None:
    """The last line of metrics that has statistics counts; runs without a memory are left out."""
    names = [f"{gate}_gate_{end}" for gate in ("forget", "input") for end in ("mean", "min", "max")]
    names += [f"{what}_{side}" for what in ("slots", "entropy") for side in ("written", "read")]
    sdm, gdn = variant("sdm", 2), variant("gdn")
    made = {}
    for run, values in {"sdm-0": (0.1, 0.5), "sdm-1": (0.2, 0.7), "gdn-0": ()}.items():
        folder = tmp_path / run
        folder.mkdir()
        lines = [{"step": step} | {f"memory/{name}": value for name in names} for step, value in enumerate(values)]
        lines.append({"step": 9, "loss": 1.0})
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        made[run] = replace(outcome(run, {}), folder=folder)
    exhibit = utilisation_section((), (sdm, gdn)).show(study_results(made))
    ((label, seeds, *cells),) = exhibit.tables[0].rows
    assert (label, seeds) == ("sdm", "2")
    assert set(cells) == {"0.600 ± 1.271"}
    assert {row[1] for row in exhibit.charts[0][0].rows()} == {"sdm, seed 0", "sdm, seed 1"}
    nothing = utilisation_section((), (gdn,)).show(study_results(made))
    assert not nothing.tables


def test_accuracy_over_tasks() -> None:
    ruler = {"tasks": {"a": {"accuracy": 0.5}, "b": {"accuracy": 1.0}}}
    harness = {"tasks": {"a": {"metrics": {"acc": {"value": 0.25}}}, "b": {"metrics": {"exact_match": {"value": 1.0}}}}}
    assert task_accuracy(ruler) == 0.75
    assert task_accuracy(harness) == 0.25, "tasks without an accuracy do not count"
    assert task_accuracy({"tasks": {}}) is None


def test_tasks_that_nobody_was_asked_name_the_package() -> None:
    models = {kind: variant(kind, 2, ruler=Ruler()) for kind in ("sdm", "gdn")}
    made = {
        f"{kind}-{seed}": outcome(f"{kind}-{seed}", {"ruler": {"tasks": {"a": {"accuracy": right + seed / 100}}}})
        for kind, right in (("sdm", 0.5), ("gdn", 0.25))
        for seed in (0, 1)
    }
    section = accuracy_section(SECTION, models, "ruler", "+1 point", "caption")
    exhibit = section.show(study_results(made))
    assert [row[:2] for row in exhibit.tables[0].rows] == [("sdm", "50.5 ± 6.4%"), ("gdn", "25.5 ± 6.4%")]
    difference = section.claims[0].difference(study_results(made))
    assert difference is not None
    assert difference.value == pytest.approx(0.25)
    with pytest.raises(ImportError, match="lm-evaluation-harness is not installed"):
        accuracy_section(SECTION, models, "harness", "+1 point", "caption").show(study_results(made))
