"""`sdm reproduce facts`: is a learned initial state M0 a parametric memory?

Models learn F random facts that never change (`recipes.facts`), and are asked for all of them. SDM with a learned and
with a null M0 at equal FLOPs; GDN with a learned and a null state at a fifth more; and SDM with a null M0 whose MLPs
have M0's parameters instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sdm.evaluation.measurement import Measurement
from sdm.evaluation.recall import Recall
from sdm.evaluation.report import AnyChart, Chart, Point, Reference, Table
from sdm.reproduce.recipes.facts import DEVIATIONS, WIDER, facts
from sdm.reproduce.study import (
    WRITE_RULE,
    Claim,
    Difference,
    Exhibit,
    Section,
    Study,
    StudyResults,
    SummaryValue,
    Variant,
    point,
    shown,
)

SEEDS = 3
COUNTS = (2048, 4096, 6144, 7500, 8192, 16384)
MEASUREMENTS: dict[str, Measurement] = {"facts": Recall()}
LEARNED, NULL, WIDE = "sdm-learned", "sdm-null", "sdm-null-wide"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    LEARNED: ("SDM, learned M0", {"global_layer": "sdm", "learned": True}),
    NULL: ("SDM, null M0", {"global_layer": "sdm", "learned": False}),
    WIDE: ("SDM, null M0, wider MLPs", {"global_layer": "sdm", "learned": False, "wider": True}),
    "gdn-learned": ("GDN, learned state", {"global_layer": "gdn", "learned": True}),
    "gdn-null": ("GDN, null state", {"global_layer": "gdn", "learned": False}),
}
HALF, TARGET = 0.5, 0.9
LEAD = (
    "A learned M0 is a table of parameters that costs no FLOPs beyond those of the memory's own reads. Does it store "
    "what a model is told over and over, and how many facts per parameter?"
)

Curves = Mapping[str, Mapping[int, Variant]]
"""By the name of the model: its variants by the number of facts."""


def variants() -> Curves:
    """Every model at every number of facts."""

    def variant(name: str, count: int) -> Variant:
        label, fields = MODELS[name]
        return Variant(
            f"{name}-{count}-seed{{seed}}",
            label,
            lambda seed: facts(num_facts=count, seed=seed, **fields),
            MEASUREMENTS,
            SEEDS,
        )

    return {name: {count: variant(name, count) for count in COUNTS} for name in MODELS}


def accuracy(count: int) -> SummaryValue:
    """The share of the facts that a model knows."""
    return lambda summary: summary["accuracy"].get(str(count))


def known(results: StudyResults, curves: Curves, name: str) -> dict[int, float]:
    """The mean share of facts known by a model, by their number."""
    means = {count: results.mean(one, accuracy(count), "facts") for count, one in curves[name].items()}
    return {count: mean.value for count, mean in means.items() if mean is not None}


def half_count(results: StudyResults, curves: Curves) -> int | None:
    """The smallest number of facts of which SDM with a null M0 knows at most half."""
    return min((count for count, share in known(results, curves, NULL).items() if share <= HALF), default=None)


def facts_study() -> Study:
    """The study of `sdm reproduce facts`."""
    curves = variants()
    groups = {"facts": [one for group in curves.values() for one in group.values()]}
    return Study("facts", "Facts in the initial state", LEAD, groups, (_section(curves),), by_seed=True)


def _section(curves: Curves) -> Section:
    def against(other: str) -> Claim:
        def difference(results: StudyResults) -> Difference | None:
            count = half_count(results, curves)
            if count is None:
                return None
            return results.paired_seeds(curves[LEARNED][count], curves[other][count], accuracy(count), "facts")

        quantity = f"SDM with learned M0 - {MODELS[other][0]}, facts known where null M0 knows at most half (points)"
        return Claim(quantity, "code NLL, learned M0 0.822, null M0 0.845", difference, "above", percent=True)

    def exhibit(results: StudyResults) -> Exhibit:
        shares = {name: known(results, curves, name) for name in MODELS}
        if not any(shares.values()):
            return Exhibit()
        count = half_count(results, curves)
        words = f"null M0 knows more than half of up to {COUNTS[-1]:,} facts" if count is None else ""
        if count is not None and count in shares[LEARNED]:
            share = shares[LEARNED][count]
            verdict = "reached" if share >= TARGET else "missed: the claim is refuted here"
            words = (
                f"at {count:,} facts, where null M0 knows {100 * shares[NULL][count]:.0f}%, learned M0 knows "
                f"{100 * share:.0f}% (target {100 * TARGET:.0f}%: {verdict})"
            )
        note = f"Wider MLPs: {WIDER} more hidden channels in each block, as many parameters as M0, at more FLOPs."
        return Exhibit([_table(results, curves), _capacity(results, curves)], [_chart(results, curves)], (note,), words)

    section = Section(
        "facts",
        "M0 as a parametric memory",
        "A learned M0 stores knowledge that a null one cannot, and GDN's small state cannot.",
        "code NLL at level 8, null to learned: SDM 0.845 to 0.822, GDN 0.849 to 0.850",
        (WRITE_RULE, *DEVIATIONS),
    )
    claims = [against(name) for name in MODELS if name != LEARNED]
    every = [one for group in curves.values() for one in group.values()]
    return replace(section, exhibit=exhibit, claims=claims, variants=every, measurement="facts")


def _table(results: StudyResults, curves: Curves) -> Table:
    rows = []
    for name, (label, _) in MODELS.items():
        means = [results.mean(curves[name][count], accuracy(count), "facts") for count in COUNTS]
        rows.append((label, *("-" if mean is None else shown(mean, 1, percent=True) for mean in means)))
    caption = "Mean over seeds with its 95% interval; every fact is asked for once."
    return Table("Facts known", ("model", *(f"F = {count:,}" for count in COUNTS)), rows, caption)


def _capacity(results: StudyResults, curves: Curves) -> Table:
    """The largest number of facts known at once, and how many that is for each parameter."""
    rows = []
    for name, (label, _) in MODELS.items():
        shares = known(results, curves, name)
        cost, length = next(iter(curves[name].values())).cost()
        parameters = cost.parameters + cost.initial_state_parameters
        most = max((share * count for count, share in shares.items()), default=None)
        cells = ("-", "-") if most is None else (f"{most:,.0f}", f"{most / parameters:.3f}")
        flops = cost.training_flops_per_token(length) // 3
        rows.append((label, f"{cost.parameters:,}", f"{cost.initial_state_parameters:,}", f"{flops:,}", *cells))
    columns = ("model", "parameters", "M0", "FLOPs", "most facts known", "facts per parameter")
    caption = "Parameters without M0; facts per parameter of both together. FLOPs of a token, forward."
    return Table("Capacity", columns, rows, caption)


def _chart(results: StudyResults, curves: Curves) -> tuple[AnyChart, str]:
    lines: dict[str, list[Point]] = {}
    for name, (label, _) in MODELS.items():
        means = {count: results.mean(curves[name][count], accuracy(count), "facts") for count in COUNTS}
        if points := [point(count, mean) for count, mean in means.items() if mean is not None]:
            lines[label] = points
    half = Reference(HALF, "half of the facts")
    chart = Chart("facts", "Facts known", "facts", "share known", lines, log_x=True, percent=True, references=(half,))
    return chart, "Share of the facts that are known after training, by their number; 95% intervals over seeds."
