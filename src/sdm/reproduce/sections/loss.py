"""Sections about loss: by position in the document, by what variants of a model differ in, and by compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sdm.analysis import charts
from sdm.analysis.scaling import PowerLaw, Prediction, fit_power_law
from sdm.evaluation.position import POSITION, growth, nats_at, position_points, stretch
from sdm.evaluation.report import AnyChart, Chart, Point, Table
from sdm.evaluation.statistics import Difference
from sdm.reproduce.exhibits import (
    MEANS,
    NATS,
    PAIRED,
    Cell,
    curve,
    difference_cell,
    difference_curve,
    fact_cell,
    loss_claim,
    loss_table,
    mean_cell,
    table,
)
from sdm.reproduce.study import Claim, Exhibit, Section, StudyResults, Variant, every, shown


def position_section(
    section: Section, sdm: Variant, rivals: Sequence[Variant], others: Sequence[Variant] = (), grows: bool = True
) -> Section:
    """SDM's loss against that of its rivals by position in the document.

    Args:
        section: Title, text, deviations of the section.
        sdm: The model with the memory.
        rivals: Forms of the baseline; SDM is compared with the one that has the lowest loss in the second half of the
            test documents, a choice in the baseline's favour.
        others: Models that are shown beside them.
        grows: Whether the paper says that the difference grows far into a document.
    """

    def rival(results: StudyResults) -> Variant:
        means = {variant: mean.value for variant in rivals if (mean := results.mean(variant, nats_at(-1)))}
        return min(means, key=means.__getitem__, default=rivals[0])

    name = rivals[0].label if len(rivals) == 1 else f"the best of {len(rivals)} forms of GDN"
    quantity = f"{sdm.label} - {name}, {NATS} in the second half of the documents"
    claims = [loss_claim(sdm, rival, "-0.028 over all positions at 1.4B", stretch(-1), quantity=quantity)]
    if grows:
        quantity = f"the same, minus the difference in the first stretch of positions, {NATS}"
        paper = "the advantage grows substantially at 32k to 512k tokens"
        claims.append(loss_claim(sdm, rival, paper, growth, quantity=quantity))

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
        figures: list[tuple[AnyChart, str]] = [
            (charts.position_chart(losses, name=section.key), f"Loss by position in held-out documents. {caption}")
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
            gap_chart = Chart(f"{section.key}-gap", title, x, y, lines, log_x=True, references=(charts.ZERO,))
            figures.append((gap_chart, f"Loss above that of SDM. {PAIRED}"))
            columns = {f"to {stop:,}": difference_cell(sdm, stretch(place)) for place, stop in enumerate(stops)}
            title = "Nats per token above SDM, to each position"
            tables.append(table(results, title, against, columns, PAIRED))
        if gains:
            text = "Loss with the reach of the local layers alone minus loss with the whole context. "
            figures.append((charts.gain_chart(gains, name=f"{section.key}-gain"), text + caption))
        notes = [
            f"Measured on the first {stops[-1]:,} tokens of {summary['documents']} test documents, "
            f"{summary['tokens']:,} tokens in all, that neither training nor the choice of learning rates has seen."
        ]
        if len(rivals) > 1 and sdm in there:
            notes.append(f"The best form of GDN in the second half of these documents is {rival(results).label}.")
        return Exhibit(tables, figures, notes)

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

    def predicted(results: StudyResults, variant: Variant) -> Prediction | None:
        """Loss of the last level as the law of the other levels predicts it."""
        law, measured = laws(results).get(variant.label), results.mean(variant)
        return None if law is None else law.predict(training_flops(variant), runs=measured.count if measured else None)

    def held_out(variant: Variant) -> Claim:
        def difference(results: StudyResults) -> Difference | None:
            measured, law = results.mean(variant), predicted(results, variant)
            if measured is None or law is None:
                return None
            value, low, high = (measured.value - float(end) for end in (law.value, law.high, law.low))
            return Difference(value, low, high, "95% prediction interval")

        quantity = f"{variant.label}, {top}: measured - predicted by the law of the other levels, {NATS}"
        return Claim(quantity, "level 13 is inside the 95% interval of the law", difference, "zero")

    def below(level: int) -> Claim:
        return loss_claim(ladder["sdm"][level], ladder["gdn"][level], "below at every level", where=f"level {level}")

    def law_cell(text: Callable[[PowerLaw], str]) -> Cell:
        return lambda results, variant: "" if (law := laws(results).get(variant.label)) is None else text(law)

    def predicted_cell(results: StudyResults, variant: Variant) -> str:
        law = predicted(results, variant)
        return "" if law is None else f"{law.value:.3f} ({law.low:.3f} ... {law.high:.3f})"

    law_columns: dict[str, Cell] = {
        "runs": law_cell(lambda law: f"{sum(law.runs)} of {len(law.levels)} levels"),
        "b (95% interval)": law_cell(lambda law: "{:.3f} ({:.3f} ... {:.3f})".format(law.b, *law.intervals["b"])),
        "R²": law_cell(lambda law: f"{law.r_squared:.3f}"),
        f"{top}, predicted": predicted_cell,
        f"{top}, measured": mean_cell(),
    }

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
        caption = f"Fitted to levels {levels[0]} to {levels[-2]}; no fit has seen {top}. Intervals by the bootstrap."
        laws_table = table(results, "Power laws L = a C^-b", tops, law_columns, caption, "global layers")
        figure = (
            charts.scaling_chart(seen, fits, runs(results, levels[-1:])),
            "Test loss against training compute: every run, the laws with their 95% intervals, and the held-out level.",
        )
        note = (
            "The models of a level see the same tokens. Attention spends more FLOPs on them, which is in its compute."
        )
        words = (
            f"R² of {len(fits)} power laws: at least {worst:.3f}" if fits else "too few levels are finished for a law"
        )
        return Exhibit([laws_table, levels_table(results)], [figure], [note], words)

    return Section(
        "ladder",
        "Scaling",
        "SDM outperforms GDN at every level of the ladder; its loss follows a power law of compute, which predicts a "
        "larger level.",
        "below GDN at every level; R² = 0.999",
        deviations,
        exhibit=exhibit,
        claims=[*map(below, levels), *map(held_out, tops)],
        variants=every(ladder),
    )


def training_flops(variant: Variant) -> float:
    """FLOPs of the whole training."""
    config, (sizes, length) = variant.recipe(0), variant.cost()
    return float(config.schedule.steps * config.data.batch_size * length * sizes.training_flops_per_token(length))
