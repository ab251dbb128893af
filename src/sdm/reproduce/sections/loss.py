"""Sections about loss: by position in the document, by what variants of a model differ in, and by compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sdm.analysis.charts import ZERO, gain_chart, position_chart, scaling_chart
from sdm.analysis.scaling import PowerLaw, Prediction, fit_power_law
from sdm.evaluation.position import POSITION, position_points
from sdm.evaluation.report import AnyChart, Chart, Point, Table
from sdm.evaluation.statistics import Mean
from sdm.reproduce.exhibits import (
    MEANS,
    NATS,
    PAIRED,
    curve,
    difference_cell,
    difference_curve,
    fact_cell,
    loss_claim,
    loss_table,
    mean_cell,
    table,
)
from sdm.reproduce.study import (
    Claim,
    Difference,
    Exhibit,
    Section,
    StudyResults,
    Variant,
    every,
    growth,
    nats_at,
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
        means = {variant: mean.value for variant in rivals if (mean := results.mean(variant, nats_at(-1)))}
        return min(means, key=means.__getitem__, default=rivals[0])

    name = rivals[0].label if len(rivals) == 1 else f"the best of {len(rivals)} forms of GDN"
    late = f"{sdm.label} - {name}, {NATS} in the second half of the documents"
    grown = f"the same, minus the difference in the first stretch of positions, {NATS}"
    claims = [
        loss_claim(sdm, rival, number, value, quantity=quantity)
        for quantity, number, value in ((late, paper, stretch(-1)), (grown, paper_growth, growth))
        if number
    ]

    def exhibit(results: StudyResults) -> Exhibit:
        there = [variant for variant in (sdm, *rivals, *others) if results.summaries(variant)]
        summary = results.summaries(there[0])[0]
        stops = [span["stop"] for span in summary["positions"]]
        losses, gains = (
            {variant.label: points for variant in there if (points := position_curve(results, variant, quantity))}
            for quantity in ("nll", "gain")
        )
        bands = any(variant.seeds > 1 for variant in there)
        caption = "Bands: 95% intervals over seeds." if bands else "One seed, without intervals."
        charts: list[tuple[AnyChart, str]] = [
            (position_chart(losses, name=section.key), f"Loss by position in held-out documents. {caption}")
        ]
        columns = {f"to {stop:,}": mean_cell(nats_at(place)) for place, stop in enumerate(stops)}
        columns |= {
            "all": mean_cell(),
            "parameters": fact_cell(lambda facts: f"{facts.parameters:,}"),
            "state": fact_cell(lambda facts: f"{facts.state_elements:,}"),
        }
        title = "Held-out documents: nats per token to each position"
        tables = [table(results, title, there, columns, f"{MEANS} Parameters without M0.")]
        against = [variant for variant in there if variant is not sdm and results.paired(sdm, variant)]
        if against:
            lines = {
                variant.label: difference_curve(
                    results, [(stop, variant, sdm, stretch(place)) for place, stop in enumerate(stops)]
                )
                for variant in against
                if variant in others or variant is rival(results)
            }
            title, x, y = "Loss above SDM by position", f"up to {POSITION}", "nats per token above SDM"
            gap_chart = Chart(f"{section.key}-gap", title, x, y, lines, log_x=True, references=(ZERO,))
            charts.append((gap_chart, f"Loss above that of SDM. {PAIRED}"))
            columns = {f"to {stop:,}": difference_cell(sdm, stretch(place)) for place, stop in enumerate(stops)}
            title = "Nats per token above SDM, to each position"
            tables.append(table(results, title, against, columns, PAIRED))
        if gains:
            text = "Loss with the reach of the local layers alone minus loss with the whole context. "
            charts.append((gain_chart(gains, name=f"{section.key}-gain"), text + caption))
        notes = [
            f"Measured on the first {stops[-1]:,} tokens of {summary['documents']} test documents, "
            f"{summary['tokens']:,} tokens in all, that neither training nor the choice of learning rates has seen."
        ]
        if len(rivals) > 1 and sdm in there:
            notes.append(f"The best form of GDN in the second half of these documents is {rival(results).label}.")
        return Exhibit(tables, charts, notes)

    return replace(section, exhibit=exhibit, claims=claims, variants=(sdm, *rivals))


def position_curve(results: StudyResults, variant: Variant, quantity: str = "nll") -> list[Point]:
    """Mean over seeds of a quantity by position; without an interval for one seed, empty if it was not measured."""
    summaries = results.summaries(variant)
    places = position_points(summaries[0]["positions"], quantity) if summaries else []
    return [
        point for place, at in enumerate(places) for point in curve(results, {at.x: variant}, nats_at(place, quantity))
    ]


@dataclass(frozen=True)
class Comparison(Section):
    """Loss and size of the variants in one table, with the claims about their differences."""

    base: Variant | None = None
    """Adds the paired difference of every variant to this one."""
    chart: Callable[[StudyResults], tuple[AnyChart, str]] | None = None
    """Makes a chart with its caption."""
    notes: Sequence[str] = ()
    """What to know about the numbers."""
    summary: Callable[[StudyResults], str] = lambda results: ""
    """What was measured, in one line."""

    def show(self, results: StudyResults) -> Exhibit:
        """The table and the chart."""
        charts = [] if self.chart is None else [self.chart(results)]
        tables = [loss_table(results, self.variants, self.title, self.base)]
        return Exhibit(tables, charts, self.notes, self.summary(results))


Ladder = Mapping[str, Mapping[int, Variant]]
"""By architecture and level."""
LEVELS_OF_A_LAW = 3  # two parameters, and one number to say how well they fit


def scaling_section(deviations: tuple[str, ...], ladder: Ladder) -> Section:
    """Loss of every level, laws fitted to all levels but the last, and the last as they predict it."""
    levels = list(ladder["sdm"])
    tops = [group[levels[-1]] for group in ladder.values()]
    top = f"level {levels[-1]}"

    def runs(results: StudyResults, levels: Sequence[int]) -> dict[str, list[tuple[float, float]]]:
        """By architecture: training FLOPs and test loss of every run."""
        points = {
            group[levels[0]].label: [
                (training_flops(group[level]), nll) for level in levels for nll in results.values(group[level]).values()
            ]
            for group in ladder.values()
        }
        return {label: losses for label, losses in points.items() if losses}

    @functools.cache
    def laws(results: StudyResults) -> dict[str, PowerLaw]:
        return {
            label: fit_power_law(*zip(*points, strict=True))
            for label, points in runs(results, levels[:-1]).items()
            if len({flops for flops, _ in points}) >= LEVELS_OF_A_LAW
        }

    def predicted(results: StudyResults, variant: Variant) -> tuple[Mean | None, Prediction | None]:
        """Loss of the last level: measured, and as the law of the other levels predicts it."""
        law, measured = laws(results).get(variant.label), results.mean(variant)
        count = measured.count if measured else None
        return measured, None if law is None else law.predict(training_flops(variant), runs=count)

    def held_out(variant: Variant) -> Claim:
        def difference(results: StudyResults) -> Difference | None:
            measured, prediction = predicted(results, variant)
            if measured is None or prediction is None:
                return None
            ends = (prediction.value, prediction.high, prediction.low)
            value, low, high = (measured.value - float(end) for end in ends)
            return Difference(value, low, high, "95% prediction interval")

        quantity = f"{variant.label}, {top}: measured - predicted by the law of the other levels, {NATS}"
        return Claim(quantity, "level 13 is inside the 95% interval of the law", difference, "zero")

    claims = [
        loss_claim(ladder["sdm"][level], ladder["gdn"][level], "below at every level", where=f"level {level}")
        for level in levels
    ]

    def laws_table(results: StudyResults) -> Table:
        rows = []
        for variant in tops:
            cells = ("", "", "", "")
            law, (measured, prediction) = laws(results).get(variant.label), predicted(results, variant)
            if law is not None and prediction is not None:
                low, high = law.intervals["b"]
                cells = (
                    f"{sum(law.runs)} of {len(law.levels)} levels",
                    f"{law.b:.3f} ({low:.3f} ... {high:.3f})",
                    f"{law.r_squared:.3f}",
                    f"{prediction.value:.3f} ({prediction.low:.3f} ... {prediction.high:.3f})",
                )
            rows.append((variant.label, *cells, shown(measured)))
        columns = ("global layers", "runs", "b (95% interval)", "R²", f"{top}, predicted", f"{top}, measured")
        caption = f"Fitted to levels {levels[0]} to {levels[-2]}; no fit has seen {top}. Intervals by the bootstrap."
        return Table("Power laws L = a C^-b", columns, rows, caption)

    def levels_table(results: StudyResults) -> Table:
        rows = []
        for level in levels:
            sdm = ladder["sdm"][level]
            sizes = (str(sdm.recipe(0).model.hidden_size), f"{sdm.cost()[0].non_embedding_parameters:,}")
            means = (shown(results.mean(group[level])) for group in ladder.values())
            rows.append((str(level), *sizes, *means, shown(results.paired(sdm, ladder["gdn"][level]), sign=True)))
        columns = ("level", "d", "parameters", *(variant.label for variant in tops), "SDM - GDN, paired")
        caption = f"{MEANS} {PAIRED} Parameters without embeddings and M0."
        return Table("Nats per token of test documents at every level", columns, rows, caption)

    def exhibit(results: StudyResults) -> Exhibit:
        fits, seen = laws(results), runs(results, levels[:-1])
        if not seen:
            return Exhibit()
        worst = min((law.r_squared for law in fits.values()), default=0.0)
        known = (
            f"R² of {len(fits)} power laws: at least {worst:.3f}" if fits else "too few levels are finished for a law"
        )
        caption = (
            "Test loss against training compute: every run, the laws with their 95% intervals, and the held-out level."
        )
        note = (
            "The models of a level see the same tokens. Attention spends more FLOPs on them, which is in its compute."
        )
        chart = scaling_chart(seen, fits, runs(results, levels[-1:]))
        return Exhibit([laws_table(results), levels_table(results)], [(chart, caption)], [note], known)

    return Section(
        "ladder",
        "Scaling",
        "SDM outperforms GDN at every level of the ladder; its loss follows a power law of compute, which predicts a "
        "larger level.",
        "below GDN at every level; R² = 0.999",
        deviations,
        exhibit=exhibit,
        claims=[*claims, *map(held_out, tops)],
        variants=every(ladder),
    )


def training_flops(variant: Variant) -> float:
    """FLOPs of the whole training."""
    config, (sizes, length) = variant.recipe(0), variant.cost()
    return float(config.schedule.steps * config.data.batch_size * length * sizes.training_flops_per_token(length))
