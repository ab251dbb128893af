"""Sections about recall: of key-value pairs against the size of the state, and of tasks in text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdm.analysis.charts import recall_chart, state_recall_chart
from sdm.evaluation.report import Point, Table
from sdm.reproduce.jobs import RunFacts
from sdm.reproduce.study import (
    Claim,
    Difference,
    Exhibit,
    Section,
    StudyResults,
    SummaryValue,
    Variant,
    point,
    shown,
)

Forms = Mapping[str, Mapping[str, Mapping[float, Variant]]]
"""By architecture ("sdm", "gdn", "full_attention", ...) and by the label of a form: its variants by learning rate."""
Score = Callable[[StudyResults, Variant], float | None]
"""What the learning rate of a form and the form of an architecture are chosen by; the largest is taken."""
RULER = "RULER (13 tasks), 1.4B: SDM 31.2, GDN 20.0, full attention 32.5; 8B: 50.2, 34.2, 61.2"
STATE_RECALL = Section(
    "recall",
    "A larger state at equal cost recalls more",
    "A larger state at the same parameters and FLOPs per token improves long-context recall.",
    RULER,
)
SEQUENCES = {
    "sdm": "SDM, more slots",
    "gdn": "GDN, fewer and wider heads",
    "kda": "KDA",
    "raven": "Raven, more slots",
    "fwpkm": "FwPKM",
}


@dataclass(frozen=True)
class Chosen:
    """A form of an architecture at its best learning rate."""

    architecture: str
    variant: Variant
    facts: RunFacts
    lr: float
    score: float
    at_edge: bool
    """Whether the rate is the lowest or the highest of several."""


def recall_section(section: Section, forms: Forms, pairs: int, score: Score, chosen_by: str) -> Section:
    """Accuracy of recall against the number of pairs and the size of the state.

    Args:
        section: Title, text, deviations of the section.
        forms: The models.
        pairs: Number of key-value pairs that models are trained to and compared at.
        score: Chooses learning rates and forms.
        chosen_by: What the score is, in words.
    """

    def accuracy(count: int) -> SummaryValue:
        return lambda summary: summary["accuracy"].get(str(count))

    def difference(results: StudyResults) -> Difference | None:
        best = _best(_choose(results, forms, score))
        if "sdm" not in best or "gdn" not in best:
            return None
        return results.paired_seeds(best["sdm"].variant, best["gdn"].variant, accuracy(pairs), "recall")

    def exhibit(results: StudyResults) -> Exhibit:
        models = _choose(results, forms, score)
        if not models:
            return Exhibit()
        best = _best(models)

        def percent(model: Chosen, count: int = pairs) -> str:
            mean = results.mean(model.variant, accuracy(count), "recall")
            return "-" if mean is None else shown(mean, 1, percent=True)

        words = [f"{model.variant.label} {percent(model)} ({_state(model)})" for model in best.values()]
        sizes = [int(count) for count in results.summaries(models[0].variant, "recall")[0]["accuracy"]]
        by_pairs: dict[str, list[Point]] = {}
        for model in best.values():
            means = {count: results.mean(model.variant, accuracy(count), "recall") for count in sizes}
            by_pairs[model.variant.label] = [point(count, mean) for count, mean in means.items() if mean]
        by_state: dict[str, list[Point]] = {}
        for model in models:
            mean = results.mean(model.variant, accuracy(pairs), "recall")
            if model.architecture in SEQUENCES and mean is not None:
                by_state.setdefault(SEQUENCES[model.architecture], []).append(point(model.facts.state_elements, mean))
        bands = "Bands: 95% intervals over seeds; models with one seed have none."
        charts = [
            (
                recall_chart(by_pairs, pairs, section.key),
                f"The best form of each architecture: accuracy against the number of pairs K. Beyond K = {pairs} "
                f"models are tested on more pairs than they were trained on. {bands}",
            ),
            (
                state_recall_chart(by_state, pairs, "state"),
                f"Accuracy at {pairs} pairs against the numbers of the state, at about equal FLOPs. {bands}",
            ),
        ]
        tables = [
            _accuracy_table(models, sizes, percent, results),
            _size_table(models, percent, pairs),
            *_sweep_table(results, forms, score, chosen_by),
        ]
        notes = [
            f"The learning rate of each form, and the form of each architecture, is chosen by {chosen_by}.",
            "The claim is about a larger state at equal parameters and FLOPs, not about recall per number of state.",
            *_equal_state(models, percent),
        ]
        return Exhibit(tables, charts, notes, f"accuracy at {pairs} pairs: {', '.join(words)}")

    variants = [variant for group in forms.values() for rates in group.values() for variant in rates.values()]
    claim = Claim(
        f"best form of SDM - best form of GDN, accuracy at {pairs} pairs (points)",
        "RULER, SDM - GDN: +11.2 points at 1.4B, +16.0 at 8B",
        difference,
        "above",
        percent=True,
    )
    return replace(section, exhibit=exhibit, claims=(claim,), variants=tuple(variants), measurement="recall")


def _choose(results: StudyResults, forms: Forms, score: Score) -> list[Chosen]:
    """Every form that has results, at its best rate; a rate in the middle of the sweep wins a tie."""
    chosen = []
    for architecture, group in forms.items():
        for rates in group.values():
            edges = (min(rates), max(rates)) if len(rates) > 1 else ()
            scores = {
                lr: value
                for lr, variant in rates.items()
                if results.summaries(variant, "recall") and (value := score(results, variant)) is not None
            }
            if scores:
                lr = max(scores, key=lambda lr: (scores[lr], lr not in edges))
                facts = results.facts(rates[lr])
                assert facts is not None, "a measured run is trained"
                chosen.append(Chosen(architecture, rates[lr], facts, lr, scores[lr], lr in edges))
    return chosen


def _best(models: Sequence[Chosen]) -> dict[str, Chosen]:
    """The best form of each architecture."""
    best: dict[str, Chosen] = {}
    for model in models:
        if model.architecture not in best or model.score > best[model.architecture].score:
            best[model.architecture] = model
    return best


def _state(model: Chosen) -> str:
    numbers = f"{model.facts.state_elements:,} numbers of state"
    return f"{numbers}, growing with the context" if model.architecture == "full_attention" else numbers


def _accuracy_table(
    models: Sequence[Chosen], sizes: Sequence[int], percent: Callable[[Chosen, int], str], results: StudyResults
) -> Table:
    rows = [
        (
            model.variant.label,
            *(percent(model, count) for count in sizes),
            f"{model.lr:g}{' (edge)' if model.at_edge else ''}",
            str(len(results.by_seed(model.variant, "recall"))),
            f"{model.facts.steps:,}",
        )
        for model in models
    ]
    columns = ("model", *(f"K={count}" for count in sizes), "lr", "seeds", "steps")
    caption = "Means over seeds; ±: 95% interval over seeds, absent with one seed. GDN, HxK: H heads of key width K."
    return Table("Recall: accuracy by the number of pairs K", columns, rows, caption)


def _size_table(models: Sequence[Chosen], percent: Callable[[Chosen], str], pairs: int) -> Table:
    largest = max(
        (model for model in models if model.architecture == "sdm"),
        key=lambda model: model.facts.state_elements,
        default=models[0],
    )
    rows = [
        (
            model.variant.label,
            f"{model.facts.state_elements:,}{' (grows)' if model.architecture == 'full_attention' else ''}",
            f"{model.facts.parameters:,}",
            f"{model.facts.initial_state_parameters:,}",
            f"{model.facts.flops_per_token / largest.facts.flops_per_token - 1:+.1%}",
            percent(model),
        )
        for model in sorted(models, key=lambda model: model.facts.state_elements)
    ]
    return Table(
        "Recall by the size of the state",
        ("model", "state", "parameters", "M0", "FLOPs", f"K={pairs}"),
        rows,
        "State: numbers kept behind the context. M0: numbers of the learned initial state, beside the parameters. "
        f"FLOPs per token, against {largest.variant.label}.",
    )


def _sweep_table(results: StudyResults, forms: Forms, score: Score, chosen_by: str) -> list[Table]:
    swept = {label: rates for group in forms.values() for label, rates in group.items() if len(rates) > 1}
    columns = sorted({lr for rates in swept.values() for lr in rates})
    rows = []
    for label, rates in swept.items():
        scores = [score(results, rates[lr]) if lr in rates else None for lr in columns]
        rows.append((label, *("-" if value is None else f"{value:.4f}" for value in scores)))
    title = "Sweep of the learning rate"
    return [Table(title, ("model", *(f"{lr:g}" for lr in columns)), rows, f"Shown: {chosen_by}.")] if rows else []


def _equal_state(models: Sequence[Chosen], percent: Callable[[Chosen], str]) -> list[str]:
    """Where SDM and GDN have states of the same size."""
    return [
        f"At an equal state of {sdm.facts.state_elements:,} numbers: {sdm.variant.label} {percent(sdm)}, "
        f"{gdn.variant.label} {percent(gdn)}."
        for sdm in models
        for gdn in models
        if (sdm.architecture, gdn.architecture) == ("sdm", "gdn")
        and sdm.facts.state_elements == gdn.facts.state_elements
    ]


def accuracy_section(
    section: Section, variants: Mapping[str, Variant], measurement: str, paper: str, caption: str
) -> Section:
    """The mean accuracy over the tasks of a measurement ("ruler" or "harness") for every architecture."""
    value = {"ruler": _ruler_accuracy, "harness": _harness_accuracy}[measurement]
    asked = all(measurement in variant.measurements for variant in variants.values())

    def exhibit(results: StudyResults) -> Exhibit:
        if not asked:
            raise ImportError("lm-evaluation-harness is not installed (the extra `eval`)")
        means = {variant: results.mean(variant, value, measurement) for variant in variants.values()}
        rows = [
            (variant.label, shown(mean, 1, percent=True), str(0 if mean is None else mean.count))
            for variant, mean in means.items()
        ]
        words = [f"{variant.label} {shown(mean, 1, percent=True)}" for variant, mean in means.items() if mean]
        if not words:
            return Exhibit()
        table = Table(section.title, ("global layers", "accuracy", "seeds"), rows, caption)
        return Exhibit([table], summary=", ".join(words))

    def difference(results: StudyResults) -> Difference | None:
        return results.paired_seeds(variants["sdm"], variants["gdn"], value, measurement)

    claim = Claim("SDM - GDN, mean accuracy of the tasks (points)", paper, difference, "above", percent=True)
    rests_on = tuple(variants.values()) if asked else ()
    return replace(section, exhibit=exhibit, claims=(claim,), variants=rests_on, measurement=measurement)


def _ruler_accuracy(summary: Mapping[str, Any]) -> float | None:
    """The mean over the tasks, each over the lengths that it fits into."""
    return _mean([task["accuracy"] for task in summary["tasks"].values()])


def _harness_accuracy(summary: Mapping[str, Any]) -> float | None:
    """The mean accuracy over the tasks that have one."""
    return _mean([task["metrics"].get("acc", {}).get("value") for task in summary["tasks"].values()])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
