"""Sections about loss: by position in the document, and by what variants of a model differ in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sdm.analysis.charts import (
    ZERO,
    differences_chart,
    gain_chart,
    initial_state_chart,
    position_chart,
    slots_chart,
    write_read_chart,
)
from sdm.evaluation.position import POSITION, position_points
from sdm.evaluation.report import AnyChart, Chart, Point, Table
from sdm.reproduce.study import (
    Claim,
    Difference,
    Exhibit,
    Section,
    StudyResults,
    UnitValue,
    Variant,
    growth,
    late_nats,
    point,
    shown,
    stretch,
    whole,
)

NATS = "nats per token"
PAIRED = (
    "Differences are paired by document and seed; ±: 95% interval over documents or over seeds, the wider one. One "
    "seed's interval is over documents and says nothing about other seeds."
)
MEANS = "Means over seeds; ±: 95% interval over seeds, absent with one seed."


def loss_claim(
    first: Variant, second: Variant, paper: str, value: UnitValue = whole, where: str = "", above: bool = False
) -> Claim:
    """A paired difference of loss: below zero, or above, in the paper."""
    names = f"{first.label} - {second.label}"
    quantity = f"{names}, {NATS}{f' {where}' if where else ''}"
    expected = "above" if above else "below"
    return Claim(quantity, paper, lambda results: results.paired(first, second, value), expected)  # type: ignore[arg-type]


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
    models = (sdm, *rivals, *others)

    def rival(results: StudyResults) -> Variant:
        means = [(mean.value, variant) for variant in rivals if (mean := results.mean(variant, late_nats))]
        return min(means, key=lambda pair: pair[0])[1] if means else rivals[0]

    def claims() -> list[Claim]:
        name = rivals[0].label if len(rivals) == 1 else f"the best of {len(rivals)} forms of GDN"
        compared: list[tuple[str, str, UnitValue]] = [
            (f"{sdm.label} - {name}, {NATS} in the second half of the documents", paper, stretch(-1)),
            (f"the same, minus the difference in the first stretch of positions, {NATS}", paper_growth, growth),
        ]
        return [
            Claim(quantity, number, lambda results, value=value: results.paired(sdm, rival(results), value))  # type: ignore[misc]
            for quantity, number, value in compared
            if number
        ]

    def exhibit(results: StudyResults) -> Exhibit:
        there = [variant for variant in models if results.summaries(variant)]
        if not there:
            return Exhibit()
        curves = {variant.label: position_curve(results, variant) for variant in there}
        gains = {variant.label: curve for variant in there if (curve := position_curve(results, variant, "gain"))}
        bands = any(variant.seeds > 1 for variant in there)
        caption = "Bands: 95% intervals over seeds." if bands else "One seed, without intervals."
        charts: list[tuple[AnyChart, str]] = [
            (position_chart(curves, name=section.key), f"Loss by position in held-out documents. {caption}")
        ]
        tables = [_position_table(results, there)]
        against = [variant for variant in there if variant is not sdm and results.paired(sdm, variant)]
        if sdm in there and against:
            best = [variant for variant in against if variant in others or variant is rival(results)]
            gaps = _gap_chart(f"{section.key}-gap", results, sdm, best)
            charts.append((gaps, f"Loss above that of SDM. {PAIRED}"))
            tables.append(_gap_table(results, sdm, against))
        if gains:
            text = "Loss with the reach of the local layers alone minus loss with the whole context. "
            charts.append((gain_chart(gains, name=f"{section.key}-gain"), text + caption))
        notes = [_documents(results, there[0])]
        if len(rivals) > 1 and sdm in there:
            notes.append(f"The best form of GDN in the second half of these documents is {rival(results).label}.")
        return Exhibit(tables, charts, notes)

    return replace(section, exhibit=exhibit, claims=claims(), variants=(sdm, *rivals))


def comparison_section(
    section: Section,
    variants: Sequence[Variant],
    claims: Sequence[Claim],
    chart: Callable[[StudyResults], tuple[AnyChart, str] | None] = lambda results: None,
    base: Variant | None = None,
    notes: Sequence[str] = (),
    summary: Callable[[StudyResults], str] = lambda results: "",
) -> Section:
    """Loss and size of variants in one table, with the claims about their differences.

    Args:
        section: Title, text, deviations of the section.
        variants: The models, in the order of the table.
        claims: Differences that the paper gives a direction for.
        chart: Makes a chart with its caption, or nothing.
        base: Adds the paired difference of every variant to this one.
        notes: What to know about the numbers.
        summary: What was measured, in one line.
    """

    def exhibit(results: StudyResults) -> Exhibit:
        if not any(results.summaries(variant) for variant in variants):
            return Exhibit()
        drawn = chart(results)
        return Exhibit(
            [comparison_table(results, variants, section.title, base)],
            [drawn] if drawn and not drawn[0].is_empty() else [],
            notes,
            summary(results),
        )

    return replace(section, exhibit=exhibit, claims=tuple(claims), variants=tuple(variants))


def slots_figure(sizes: Mapping[int, Variant], baseline: Variant) -> Callable[[StudyResults], tuple[AnyChart, str]]:
    """Loss against the number of slots, with the loss of a model without slots."""

    def chart(results: StudyResults) -> tuple[AnyChart, str]:
        points = [point(slots, mean) for slots, variant in sizes.items() if (mean := results.mean(variant))]
        level = results.mean(baseline)
        levels = {baseline.label: point(0, level)} if level else {}
        return slots_chart({"SDM": points}, levels), f"Loss by the number of slots. {MEANS}"

    return chart


def initial_state_figure(
    learned: Mapping[str, Variant], null: Mapping[str, Variant]
) -> Callable[[StudyResults], tuple[AnyChart, str]]:
    """Loss by position with learned and null initial states, by the name of the architecture."""

    def chart(results: StudyResults) -> tuple[AnyChart, str]:
        curves: list[dict[str, list[Point]]] = []
        for side in (learned, null):
            by_name = {name: position_curve(results, variant) for name, variant in side.items()}
            curves.append({name: curve for name, curve in by_name.items() if curve})
        return initial_state_chart(curves[0], curves[1]), "Loss by position with learned and null initial states."

    return chart


def grid_figure(grid: Mapping[tuple[int, int], Variant]) -> Callable[[StudyResults], tuple[AnyChart, str]]:
    """Loss by the numbers of writes and reads."""

    def chart(results: StudyResults) -> tuple[AnyChart, str]:
        cells = {pair: point(0, mean) for pair, variant in grid.items() if (mean := results.mean(variant))}
        return write_read_chart(cells), f"Loss by the writes and reads of a token. {MEANS}"

    return chart


def differences_figure(
    variants: Sequence[Variant], base: Variant, name: str
) -> Callable[[StudyResults], tuple[AnyChart, str]]:
    """Paired differences of variants to one of them."""

    def chart(results: StudyResults) -> tuple[AnyChart, str]:
        points = {
            variant.label: difference.point()
            for variant in variants
            if variant is not base and (difference := results.paired(variant, base)) is not None
        }
        drawn = differences_chart(points, f"{NATS} above {base.label}", name, f"Loss above {base.label}")
        return drawn, f"Loss above {base.label}. {PAIRED}"

    return chart


def pairwise_claims(variants: Sequence[Variant], papers: Sequence[str]) -> list[Claim]:
    """Each variant against the one before it."""
    return [
        loss_claim(second, first, paper)
        for (first, second), paper in zip(itertools.pairwise(variants), papers, strict=True)
    ]


def position_curve(results: StudyResults, variant: Variant, quantity: str = "nll") -> list[Point]:
    """Mean over seeds of a quantity by position; without an interval for one seed, empty if it was not measured."""
    summaries = results.summaries(variant)
    places = position_points(summaries[0]["positions"], quantity) if summaries else []
    curve = []
    for place, at in enumerate(places):
        mean = results.mean(variant, lambda summary, place=place: summary["positions"][place][quantity])  # type: ignore[misc]
        if mean is not None:
            curve.append(point(at.x, mean))
    return curve


def comparison_table(
    results: StudyResults, variants: Sequence[Variant], title: str, base: Variant | None = None
) -> Table:
    """Loss, size and cost of variants."""
    rows = []
    for variant in variants:
        sizes, length = variant.cost()
        state = sizes.state_elements + sizes.kv_elements_per_token * length
        difference = results.paired(variant, base) if base is not None and base is not variant else None
        rows.append(
            (
                variant.label,
                str(len(results.by_seed(variant, "position"))),
                shown(results.mean(variant)),
                shown(results.mean(variant, late_nats)),
                *(() if base is None else ("-" if difference is None else shown(difference, sign=True),)),
                f"{sizes.parameters:,}",
                f"{state:,}",
                f"{sizes.training_flops_per_token(length) // 3:,}",
            )
        )
    extra = () if base is None else (f"to {base.label}",)
    return Table(
        title,
        ("model", "seeds", NATS, "second half", *extra, "parameters", "state", "FLOPs/token"),
        rows,
        f"{MEANS} State: numbers that global layers keep behind a training sequence. Parameters are without M0, the "
        f"learned initial state of SDM.{'' if base is None else f' {PAIRED}'}",
    )


def _position_table(results: StudyResults, models: Sequence[Variant]) -> Table:
    bins = results.summaries(models[0])[0]["positions"]
    rows = []
    for variant in models:
        means = [
            results.mean(variant, lambda summary, place=place: summary["positions"][place]["nll"])  # type: ignore[misc]
            for place in range(len(bins))
        ]
        facts = results.facts(variant)
        sizes = ("", "") if facts is None else (f"{facts.parameters:,}", f"{facts.state_elements:,}")
        rows.append((variant.label, *map(shown, means), shown(results.mean(variant)), *sizes))
    columns = ("model", *(f"to {span['stop']:,}" for span in bins), "all", "parameters", "state")
    return Table(
        "Held-out documents: nats per token to each position", columns, rows, f"{MEANS} Parameters without M0."
    )


def _gaps(results: StudyResults, sdm: Variant, other: Variant) -> list[tuple[int, Difference]]:
    """The other's loss minus SDM's, with the end of each stretch of positions."""
    bins = results.summaries(sdm)[0]["positions"]
    gaps = [(int(span["stop"]), results.paired(other, sdm, stretch(place))) for place, span in enumerate(bins)]
    return [(stop, difference) for stop, difference in gaps if difference is not None]


def _gap_chart(name: str, results: StudyResults, sdm: Variant, others: Sequence[Variant]) -> Chart:
    curves = {
        variant.label: [difference.point(stop) for stop, difference in _gaps(results, sdm, variant)]
        for variant in others
    }
    title, y = "Loss above SDM by position", "nats per token above SDM"
    return Chart(name, title, f"up to {POSITION}", y, curves, log_x=True, references=(ZERO,))


def _gap_table(results: StudyResults, sdm: Variant, others: Sequence[Variant]) -> Table:
    gaps = {variant.label: _gaps(results, sdm, variant) for variant in others}
    rows = [(label, *(shown(difference, sign=True) for _, difference in row)) for label, row in gaps.items()]
    columns = ("model", *(f"to {stop:,}" for stop, _ in next(iter(gaps.values()))))
    return Table("Nats per token above SDM, to each position", columns, rows, PAIRED)


def _documents(results: StudyResults, variant: Variant) -> str:
    summary = results.summaries(variant)[0]
    return (
        f"Measured on the first {summary['positions'][-1]['stop']:,} tokens of {summary['documents']} test documents, "
        f"{summary['tokens']:,} tokens in all, that neither training nor the choice of learning rates has seen."
    )
