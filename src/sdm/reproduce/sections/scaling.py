"""The section about scaling: loss against compute, its power laws, and a level that they predict."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sdm.analysis.charts import scaling_chart
from sdm.analysis.scaling import PowerLaw, fit_power_law
from sdm.evaluation.report import Table
from sdm.reproduce.sections.loss import MEANS, PAIRED, loss_claim
from sdm.reproduce.study import Claim, Difference, Exhibit, Section, StudyResults, Variant, shown

Ladder = Mapping[str, Mapping[int, Variant]]
"""By architecture and level."""
Runs = dict[str, list[tuple[float, float]]]
"""By the label of an architecture: training FLOPs and test loss of every run."""
LEVELS_OF_A_LAW = 3  # two parameters, and one number to say how well they fit


def training_flops(variant: Variant) -> float:
    """FLOPs of the whole training."""
    config, (sizes, length) = variant.recipe(0), variant.cost()
    steps = config.schedule.steps * config.data.batch_size
    return float(steps * length * sizes.training_flops_per_token(length))


def scaling_section(section: Section, ladder: Ladder) -> Section:
    """Loss of every level, laws fitted to all levels but the last, and the last as they predict it."""
    levels = list(next(iter(ladder.values())))
    fitted, top = levels[:-1], levels[-1]
    variants = [variant for group in ladder.values() for variant in group.values()]

    @functools.cache
    def laws(results: StudyResults) -> dict[str, PowerLaw]:
        runs = _runs(results, ladder, fitted)
        return {
            label: fit_power_law(*zip(*points, strict=True))
            for label, points in runs.items()
            if len({flops for flops, _ in points}) >= LEVELS_OF_A_LAW
        }

    def held_out(kind: str) -> Claim:
        variant = ladder[kind][top]

        def difference(results: StudyResults) -> Difference | None:
            law, measured = laws(results).get(variant.label), results.mean(variant)
            if law is None or measured is None:
                return None
            prediction = law.predict(training_flops(variant), runs=measured.count)
            value, low, high = (measured.value - float(x) for x in (prediction.value, prediction.high, prediction.low))
            return Difference(value, low, high, "95% prediction interval")

        quantity = f"{variant.label}, level {top}: measured - predicted by the law of the other levels, nats per token"
        return Claim(quantity, "level 13 is inside the 95% interval of the law", difference, "zero")

    claims = [
        replace(claim, quantity=f"level {level}: {claim.quantity}")
        for level in levels
        for claim in [loss_claim(ladder["sdm"][level], ladder["gdn"][level], "below at every level")]
    ]
    claims += [held_out(kind) for kind in ladder]

    def exhibit(results: StudyResults) -> Exhibit:
        fits, seen, unseen = laws(results), _runs(results, ladder, fitted), _runs(results, ladder, [top])
        if not seen:
            return Exhibit()
        worst = min((law.r_squared for law in fits.values()), default=None)
        summary = (
            "too few levels are finished for a law"
            if worst is None
            else f"R² of {len(fits)} power laws: at least {worst:.3f}"
        )
        caption = (
            "Test loss against training compute: every run, the laws with their 95% intervals, and the held-out level."
        )
        charts = [(scaling_chart(seen, fits, unseen), caption)]
        tables = [_laws_table(results, ladder, fits, fitted, top), _levels_table(results, ladder, levels)]
        note = (
            "The models of a level see the same tokens. Attention spends more FLOPs on them, which is in its compute."
        )
        return Exhibit(tables, charts, [note], summary)

    return replace(section, exhibit=exhibit, claims=tuple(claims), variants=tuple(variants))


def _runs(results: StudyResults, ladder: Ladder, levels: Sequence[int]) -> Runs:
    curves: Runs = {}
    for group in ladder.values():
        for variant in (group[level] for level in levels):
            flops = training_flops(variant)
            points = [(flops, float(summary["nll"])) for summary in results.summaries(variant)]
            if points:
                curves.setdefault(variant.label, []).extend(points)
    return curves


def _laws_table(
    results: StudyResults, ladder: Ladder, laws: Mapping[str, PowerLaw], fitted: Sequence[int], top: int
) -> Table:
    rows = []
    for group in ladder.values():
        variant = group[top]
        law, measured = laws.get(variant.label), results.mean(variant)
        if law is None:
            rows.append((variant.label, "", "", "", "", shown(measured)))
            continue
        prediction = law.predict(training_flops(variant), runs=measured.count if measured else None)
        low, high = law.intervals["b"]
        rows.append(
            (
                variant.label,
                f"{sum(law.runs)} of {len(law.levels)} levels",
                f"{law.b:.3f} ({low:.3f} ... {high:.3f})",
                f"{law.r_squared:.3f}",
                f"{prediction.value:.3f} ({prediction.low:.3f} ... {prediction.high:.3f})",
                shown(measured),
            )
        )
    columns = ("global layers", "runs", "b (95% interval)", "R²", f"level {top}, predicted", f"level {top}, measured")
    caption = f"Fitted to levels {fitted[0]} to {fitted[-1]}; no fit has seen level {top}. Intervals by the bootstrap."
    return Table("Power laws L = a C^-b", columns, rows, caption)


def _levels_table(results: StudyResults, ladder: Ladder, levels: Sequence[int]) -> Table:
    rows = []
    for level in levels:
        sizes, _ = ladder["sdm"][level].cost()
        means = (shown(results.mean(group[level])) for group in ladder.values())
        paired = shown(results.paired(ladder["sdm"][level], ladder["gdn"][level]), sign=True)
        width = str(ladder["sdm"][level].recipe(0).model.hidden_size)
        rows.append((str(level), width, f"{sizes.non_embedding_parameters:,}", *means, paired))
    labels = (group[levels[0]].label for group in ladder.values())
    return Table(
        "Nats per token of test documents at every level",
        ("level", "d", "parameters", *labels, "SDM - GDN, paired"),
        rows,
        f"{MEANS} {PAIRED} Parameters without embeddings and M0.",
    )
