"""Parts of sections: the best learning rate, curves of means, tables of variants, and claims about chosen models."""

from __future__ import annotations

import pytest

from reproduce.made import outcome, study_results
from sdm.evaluation.recall import Recall
from sdm.reproduce.exhibits import (
    accuracy_at,
    accuracy_claim,
    best_rate,
    choice_accuracy,
    curves,
    grid_table,
    mean_cell,
    seeds_cell,
    table,
)
from sdm.reproduce.study import StudyResults, every, sweep
from sdm.run.config import TrainConfig

PAIRS = 64
RATES = (1e-3, 2e-3, 4e-3)
MEASURED = {"recall": Recall(), "choice": Recall(seed=2)}
MODELS = sweep("sdm-lr{lr:g}-seed{seed}", "SDM", RATES, MEASURED, 2, lambda lr, seed: TrainConfig(seed=seed))


def results(shares: dict[float, float]) -> StudyResults:
    """Models with these accuracies at every seed; the others are missing."""
    accuracies = {MODELS[lr].run_name(seed): share for lr, share in shares.items() for seed in (0, 1)}
    summaries = {name: {"accuracy": {str(PAIRS): share}} for name, share in accuracies.items()}
    runs = {name: outcome(name, {"recall": summary, "choice": summary}) for name, summary in summaries.items()}
    return study_results(runs, every(MODELS))


def test_a_sweep_names_its_runs_by_rate_and_seed() -> None:
    assert [variant.run_name(1) for variant in MODELS.values()] == [f"sdm-lr{lr:g}-seed1" for lr in RATES]
    assert MODELS[RATES[0]].recipe(3).seed == 3


@pytest.mark.parametrize(
    ("shares", "rate"),
    [
        ({1e-3: 0.5, 2e-3: 0.7, 4e-3: 0.6}, "0.002"),
        ({1e-3: 0.9, 2e-3: 0.7}, "0.001 (edge)"),
        ({1e-3: 1.0, 2e-3: 1.0, 4e-3: 1.0}, "0.002"),  # the middle wins a tie
        ({4e-3: 0.1}, "0.004 (edge)"),
    ],
)
def test_the_best_rate(shares: dict[float, float], rate: str) -> None:
    chosen = best_rate(results(shares), MODELS, choice_accuracy(PAIRS))
    assert chosen is not None
    assert chosen.rate() == rate
    assert chosen.variant is MODELS[chosen.lr]


def test_without_results_there_is_nothing_to_choose_or_draw() -> None:
    assert best_rate(results({}), MODELS, choice_accuracy(PAIRS)) is None
    assert curves(results({}), {"SDM": MODELS}, accuracy_at(PAIRS), "recall") == {}
    claim = accuracy_claim("a - b", "1", MODELS[1e-3], lambda results: None, accuracy_at(PAIRS), "recall")
    assert claim.difference(results({1e-3: 0.5})) is None


def test_curves_are_at_the_keys_of_what_is_measured() -> None:
    lines = curves(results({1e-3: 0.5, 4e-3: 0.25}), {"SDM": MODELS}, accuracy_at(PAIRS), "recall")
    assert [(point.x, point.y, point.low) for point in lines["SDM"]] == [(1e-3, 0.5, 0.5), (4e-3, 0.25, 0.25)]


def test_tables_say_what_is_missing() -> None:
    measured = results({1e-3: 0.5})
    accuracy = mean_cell(accuracy_at(PAIRS), "recall", percent=True)
    rows = table(measured, "", every(MODELS), {"seeds": seeds_cell("recall"), "K": accuracy}, "").rows
    assert rows == [("SDM", "2", "50.0 ± 0.0%"), ("SDM", "0", "missing"), ("SDM", "0", "missing")]
    assert mean_cell(measurement="position", missing="-")(measured, MODELS[1e-3]) == "-", "it is not measured at all"
    grid = grid_table("", {"SDM": {1: MODELS[1e-3]}}, {1: "one", 2: "two"}, lambda variant: variant.label, "")
    assert grid.columns == ("model", "one", "two")
    assert grid.rows == [("SDM", "SDM", "-")]
