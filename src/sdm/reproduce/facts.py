"""`sdm reproduce facts`: is a learned initial state M0 a parametric memory?

Models learn F random facts that never change (`recipes.tasks.facts`), and are asked for all of them. SDM with a learned
and with a null M0 at equal FLOPs; GDN with a learned and a null state at a fifth more; and SDM with a null M0 whose
MLPs have M0's parameters instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdm.evaluation.measurement import Measurement
from sdm.evaluation.recall import Recall
from sdm.evaluation.report import Chart, Reference, Table
from sdm.reproduce.exhibits import (
    FLOPS,
    FORWARD,
    INITIAL_STATE,
    PARAMETERS,
    Cell,
    Model,
    accuracy_claim,
    curve,
    curves,
    grid_table,
    mean_cell,
    table,
)
from sdm.reproduce.recipes.tasks import FACTS_DEVIATIONS, WIDER, facts
from sdm.reproduce.study import (
    WRITE_RULE,
    Claim,
    Exhibit,
    Section,
    Study,
    StudyResults,
    Variant,
    by_seed,
    every,
    seeded,
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

Models = Mapping[str, Mapping[int, Variant]]
"""By the name of the model: its variants by the number of facts."""


def variants() -> Models:
    """Every model at every number of facts."""
    return {
        name: {
            count: Variant(
                f"{name}-{count}-seed{{seed}}", label, seeded(facts, num_facts=count, **fields), MEASUREMENTS, SEEDS
            )
            for count in COUNTS
        }
        for name, (label, fields) in MODELS.items()
    }


def only_accuracy(summary: Mapping[str, Any]) -> float | None:
    """The share of the facts that a model knows, of the only number of facts that it was asked for."""
    return next(iter(summary["accuracy"].values()), None)


def known(results: StudyResults, by_count: Mapping[int, Variant]) -> dict[int, float]:
    """The mean share of facts known by a model, by their number."""
    return {int(point.x): point.y for point in curve(results, by_count, only_accuracy, "facts")}


def half_count(results: StudyResults, models: Models) -> int | None:
    """The smallest number of facts of which SDM with a null M0 knows at most half."""
    return min((count for count, share in known(results, models[NULL]).items() if share <= HALF), default=None)


def facts_study() -> Study:
    """The study of `sdm reproduce facts`."""
    models = variants()
    groups = {"facts": every(models)}
    return Study("facts", "Facts in the initial state", LEAD, groups, (_section(models),), round_of=by_seed)


def _section(models: Models) -> Section:
    def against(other: str) -> Claim:
        def at_half(name: str) -> Model:
            return lambda results: models[name].get(half_count(results, models) or 0)

        quantity = f"SDM with learned M0 - {MODELS[other][0]}, facts known where null M0 knows at most half"
        paper = "code NLL, learned M0 0.822, null M0 0.845"
        return accuracy_claim(quantity, paper, at_half(LEARNED), at_half(other), only_accuracy, "facts")

    def exhibit(results: StudyResults) -> Exhibit:
        shares = {name: known(results, by_count) for name, by_count in models.items()}
        if not any(shares.values()):
            return Exhibit()
        count = half_count(results, models)
        words = f"null M0 knows more than half of up to {COUNTS[-1]:,} facts" if count is None else ""
        if count is not None and count in shares[LEARNED]:
            share = shares[LEARNED][count]
            verdict = "reached" if share >= TARGET else "missed: the claim is refuted here"
            words = (
                f"at {count:,} facts, where null M0 knows {100 * shares[NULL][count]:.0f}%, learned M0 knows "
                f"{100 * share:.0f}% (target {100 * TARGET:.0f}%: {verdict})"
            )
        rows = {MODELS[name][0]: by_count for name, by_count in models.items()}
        lines, half = curves(results, rows, only_accuracy, "facts"), (Reference(HALF, "half of the facts"),)
        chart = Chart("facts", "Facts known", "facts", "share known", lines, log_x=True, percent=True, references=half)
        about = "Share of the facts that are known after training, by their number; 95% intervals over seeds."
        note = f"Wider MLPs: {WIDER} more hidden channels in each block, as many parameters as M0, at more FLOPs."
        accuracy, columns = mean_cell(only_accuracy, "facts", True, "-"), {count: f"F = {count:,}" for count in COUNTS}
        caption = "Mean over seeds with its 95% interval; every fact is asked for once."
        facts_known = grid_table("Facts known", rows, columns, lambda variant: accuracy(results, variant), caption)
        return Exhibit([facts_known, _capacity_table(results, models)], [(chart, about)], (note,), words)

    return Section(
        "facts",
        "M0 as a parametric memory",
        "A learned M0 stores knowledge that a null one cannot, and GDN's small state cannot.",
        "code NLL at level 8, null to learned: SDM 0.845 to 0.822, GDN 0.849 to 0.850",
        (WRITE_RULE, *FACTS_DEVIATIONS),
        exhibit=exhibit,
        claims=[against(name) for name in MODELS if name not in (LEARNED, WIDE)],
        variants=every(models),
        measurement="facts",
    )


def _capacity_table(results: StudyResults, models: Models) -> Table:
    """The largest number of facts known at once, and how many that is for each parameter."""
    first = {next(iter(by_count.values())): by_count for by_count in models.values()}
    most = {
        variant: max((share * count for count, share in known(results, by_count).items()), default=None)
        for variant, by_count in first.items()
    }

    def per_parameter(results: StudyResults, variant: Variant) -> str:
        sizes, facts = variant.cost()[0], most[variant]
        return "-" if facts is None else f"{facts / (sizes.parameters + sizes.initial_state_parameters):.3f}"

    columns: dict[str, Cell] = {
        "parameters": PARAMETERS,
        "M0": INITIAL_STATE,
        "FLOPs": FLOPS,
        "most facts known": lambda results, variant: "-" if (facts := most[variant]) is None else f"{facts:,.0f}",
        "facts per parameter": per_parameter,
    }
    return table(
        results, "Capacity", first, columns, f"Parameters without M0; facts per parameter of both together. {FORWARD}"
    )
