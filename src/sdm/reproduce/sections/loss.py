"""Sections about loss: by position in the document, by what variants of a model differ in, and by compute."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sdm.analysis.charts import ZERO, gain_chart, position_chart, scaling_chart
from sdm.analysis.scaling import PowerLaw, fit_power_law
from sdm.evaluation.position import POSITION, position_points
from sdm.evaluation.report import AnyChart, Chart, Point, Table
from sdm.reproduce.exhibits import MEANS, NATS, PAIRED, curve, fact_cell, loss_claim, loss_table, mean_cell, table
from sdm.reproduce.study import (
    Claim,
    Difference,
    Exhibit,
    Section,
    StudyResults,
    SummaryValue,
    UnitValue,
    Variant,
    every,
    growth,
    late_nats,
    shown,
    stretch,
)


def position_section(
    section: Section,
    sdm: Variant,
    rivals: Sequence[Variant],
    others: Sequence[Variant] = (),
    paper: str = "",
    paper_growth: str = "",
) -> Section:
    """SDM's loss against that of its rivals by position in the document.

    Args:
        section: Title, text, deviations of the section.
        sdm: The model with the memory.
        rivals: Forms of the baseline; SDM is compared with the one that has the lowest loss in the second half of the
            test documents, a choice in the baseline's favour.
        others: Models that are shown beside them.
        paper: The paper's difference.
        paper_growth: What the paper says of the difference far into a document.
    """

    def rival(results: StudyResults) -> Variant:
        means = [(mean.value, variant) for variant in rivals if (mean := results.mean(variant, late_nats))]
        return min(means, key=lambda pair: pair[0])[1] if means else rivals[0]

    def claim(quantity: str, number: str, value: UnitValue) -> Claim:
        return Claim(quantity, number, lambda results: results.paired(sdm, rival(results), value))

    name = rivals[0].label if len(rivals) == 1 else f"the best of {len(rivals)} forms of GDN"
    claims = [
        claim(f"{sdm.label} - {name}, {NATS} in the second half of the documents", paper, stretch(-1)),
        claim(f"the same, minus the difference in the first stretch of positions, {NATS}", paper_growth, growth),
    ]

    def exhibit(results: StudyResults) -> Exhibit:
        there = [variant for variant in (sdm, *rivals, *others) if results.summaries(variant)]
        curves = {variant.label: position_curve(results, variant) for variant in there}
        gains = {variant.label: points for variant in there if (points := position_curve(results, variant, "gain"))}
        bands = any(variant.seeds > 1 for variant in there)
        caption = "Bands: 95% intervals over seeds." if bands else "One seed, without intervals."
        charts: list[tuple[AnyChart, str]] = [
            (position_chart(curves, name=section.key), f"Loss by position in held-out documents. {caption}")
        ]
        tables = [_position_table(results, there)]
        against = [variant for variant in there if variant is not sdm and results.paired(sdm, variant)]
        if sdm in there and against:
            gaps = {variant: _gaps(results, sdm, variant) for variant in against}
            best = [variant for variant in against if variant in others or variant is rival(results)]
            lines = {variant.label: [gap.point(stop) for stop, gap in gaps[variant]] for variant in best}
            title, x, y = "Loss above SDM by position", f"up to {POSITION}", "nats per token above SDM"
            gap_chart = Chart(f"{section.key}-gap", title, x, y, lines, log_x=True, references=(ZERO,))
            charts.append((gap_chart, f"Loss above that of SDM. {PAIRED}"))
            rows = [(variant.label, *(shown(gap, sign=True) for _, gap in row)) for variant, row in gaps.items()]
            columns = ("model", *(f"to {stop:,}" for stop, _ in gaps[against[0]]))
            tables.append(Table("Nats per token above SDM, to each position", columns, rows, PAIRED))
        if gains:
            text = "Loss with the reach of the local layers alone minus loss with the whole context. "
            charts.append((gain_chart(gains, name=f"{section.key}-gain"), text + caption))
        summary = results.summaries(there[0])[0]
        notes = [
            f"Measured on the first {summary['positions'][-1]['stop']:,} tokens of {summary['documents']} test "
            f"documents, {summary['tokens']:,} tokens in all, that neither training nor the choice of learning rates "
            "has seen."
        ]
        if len(rivals) > 1 and sdm in there:
            notes.append(f"The best form of GDN in the second half of these documents is {rival(results).label}.")
        return Exhibit(tables, charts, notes)

    claims = [claim for claim in claims if claim.paper]
    return replace(section, exhibit=exhibit, claims=claims, variants=(sdm, *rivals))


def _at(place: int, quantity: str = "nll") -> SummaryValue:
    """A quantity in a stretch of positions."""
    return lambda summary: summary["positions"][place][quantity]


def position_curve(results: StudyResults, variant: Variant, quantity: str = "nll") -> list[Point]:
    """Mean over seeds of a quantity by position; without an interval for one seed, empty if it was not measured."""
    summaries = results.summaries(variant)
    places = position_points(summaries[0]["positions"], quantity) if summaries else []
    return [point for place, at in enumerate(places) for point in curve(results, {at.x: variant}, _at(place, quantity))]


def _position_table(results: StudyResults, models: Sequence[Variant]) -> Table:
    spans = results.summaries(models[0])[0]["positions"]
    columns = {f"to {span['stop']:,}": mean_cell(_at(place)) for place, span in enumerate(spans)}
    columns |= {
        "all": mean_cell(),
        "parameters": fact_cell(lambda facts: f"{facts.parameters:,}"),
        "state": fact_cell(lambda facts: f"{facts.state_elements:,}"),
    }
    title = "Held-out documents: nats per token to each position"
    return table(results, title, models, columns, f"{MEANS} Parameters without M0.")


def _gaps(results: StudyResults, sdm: Variant, other: Variant) -> list[tuple[int, Difference]]:
    """The other's loss minus SDM's, with the end of each stretch of positions."""
    spans = results.summaries(sdm)[0]["positions"]
    gaps = [(int(span["stop"]), results.paired(other, sdm, stretch(place))) for place, span in enumerate(spans)]
    return [(stop, difference) for stop, difference in gaps if difference is not None]


def comparison_section(
    section: Section,
    variants: Sequence[Variant],
    claims: Sequence[Claim] = (),
    chart: Callable[[StudyResults], tuple[AnyChart, str]] | None = None,
    base: Variant | None = None,
    notes: Sequence[str] = (),
    summary: Callable[[StudyResults], str] = lambda results: "",
) -> Section:
    """Loss and size of variants in one table, with the claims about their differences.

    Args:
        section: Title, text, deviations of the section.
        variants: The models, in the order of the table.
        claims: Differences that the paper gives a direction for.
        chart: Makes a chart with its caption.
        base: Adds the paired difference of every variant to this one.
        notes: What to know about the numbers.
        summary: What was measured, in one line.
    """

    def exhibit(results: StudyResults) -> Exhibit:
        charts = [] if chart is None else [chart(results)]
        return Exhibit([loss_table(results, variants, section.title, base)], charts, notes, summary(results))

    return replace(section, exhibit=exhibit, claims=tuple(claims), variants=tuple(variants))


def pairwise_claims(variants: Sequence[Variant], papers: Sequence[str]) -> list[Claim]:
    """Each variant against the one before it."""
    pairs = zip(itertools.pairwise(variants), papers, strict=True)
    return [loss_claim(second, first, paper) for (first, second), paper in pairs]


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

    @functools.cache
    def laws(results: StudyResults) -> dict[str, PowerLaw]:
        return {
            label: fit_power_law(*zip(*points, strict=True))
            for label, points in _runs(results, ladder, fitted).items()
            if len({flops for flops, _ in points}) >= LEVELS_OF_A_LAW
        }

    def held_out(variant: Variant) -> Claim:
        def difference(results: StudyResults) -> Difference | None:
            law, measured = laws(results).get(variant.label), results.mean(variant)
            if law is None or measured is None:
                return None
            prediction = law.predict(training_flops(variant), runs=measured.count)
            value, low, high = (measured.value - float(x) for x in (prediction.value, prediction.high, prediction.low))
            return Difference(value, low, high, "95% prediction interval")

        quantity = f"{variant.label}, level {top}: measured - predicted by the law of the other levels, {NATS}"
        return Claim(quantity, "level 13 is inside the 95% interval of the law", difference, "zero")

    def level_claim(sdm: Variant, gdn: Variant, level: int) -> Claim:
        quantity = f"level {level}: {sdm.label} - {gdn.label}, {NATS}"
        return loss_claim(sdm, gdn, "below at every level", quantity=quantity)

    claims = [level_claim(ladder["sdm"][level], ladder["gdn"][level], level) for level in levels]
    claims += [held_out(group[top]) for group in ladder.values()]

    def exhibit(results: StudyResults) -> Exhibit:
        fits, seen, unseen = laws(results), _runs(results, ladder, fitted), _runs(results, ladder, [top])
        if not seen:
            return Exhibit()
        worst = min((law.r_squared for law in fits.values()), default=None)
        known = f"R² of {len(fits)} power laws: at least {worst:.3f}" if worst is not None else ""
        caption = (
            "Test loss against training compute: every run, the laws with their 95% intervals, and the held-out level."
        )
        tables = [_laws_table(results, ladder, fits, fitted, top), _levels_table(results, ladder, levels)]
        note = (
            "The models of a level see the same tokens. Attention spends more FLOPs on them, which is in its compute."
        )
        summary = known or "too few levels are finished for a law"
        return Exhibit(tables, [(scaling_chart(seen, fits, unseen), caption)], [note], summary)

    return replace(section, exhibit=exhibit, claims=claims, variants=every(ladder))


def _runs(results: StudyResults, ladder: Ladder, levels: Sequence[int]) -> Runs:
    curves: Runs = {}
    for variant in (group[level] for group in ladder.values() for level in levels):
        losses = [float(summary["nll"]) for summary in results.summaries(variant)]
        if losses:
            flops = training_flops(variant)
            curves.setdefault(variant.label, []).extend((flops, loss) for loss in losses)
    return curves


def _laws_table(
    results: StudyResults, ladder: Ladder, laws: Mapping[str, PowerLaw], fitted: Sequence[int], top: int
) -> Table:
    rows = []
    for variant in (group[top] for group in ladder.values()):
        law, measured = laws.get(variant.label), results.mean(variant)
        cells = ("", "", "", "")
        if law is not None:
            prediction = law.predict(training_flops(variant), runs=measured.count if measured else None)
            low, high = law.intervals["b"]
            cells = (
                f"{sum(law.runs)} of {len(law.levels)} levels",
                f"{law.b:.3f} ({low:.3f} ... {high:.3f})",
                f"{law.r_squared:.3f}",
                f"{prediction.value:.3f} ({prediction.low:.3f} ... {prediction.high:.3f})",
            )
        rows.append((variant.label, *cells, shown(measured)))
    columns = ("global layers", "runs", "b (95% interval)", "R²", f"level {top}, predicted", f"level {top}, measured")
    caption = f"Fitted to levels {fitted[0]} to {fitted[-1]}; no fit has seen level {top}. Intervals by the bootstrap."
    return Table("Power laws L = a C^-b", columns, rows, caption)


def _levels_table(results: StudyResults, ladder: Ladder, levels: Sequence[int]) -> Table:
    rows = []
    for level in levels:
        sdm = ladder["sdm"][level]
        sizes = (str(sdm.recipe(0).model.hidden_size), f"{sdm.cost()[0].non_embedding_parameters:,}")
        means = (shown(results.mean(group[level])) for group in ladder.values())
        rows.append((str(level), *sizes, *means, shown(results.paired(sdm, ladder["gdn"][level]), sign=True)))
    labels = (group[levels[0]].label for group in ladder.values())
    columns = ("level", "d", "parameters", *labels, "SDM - GDN, paired")
    caption = f"{MEANS} {PAIRED} Parameters without embeddings and M0."
    return Table("Nats per token of test documents at every level", columns, rows, caption)
