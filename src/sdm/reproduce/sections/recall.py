"""Sections about recall: of key-value pairs against the size of the state, and of tasks in text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sdm.analysis import charts
from sdm.evaluation.report import Point
from sdm.reproduce.exhibits import (
    MEANS,
    Cell,
    Chosen,
    Score,
    accuracy_at,
    accuracy_claim,
    best_rate,
    curve,
    fact_cell,
    grid_table,
    mean_cell,
    seeds_cell,
    table,
)
from sdm.reproduce.study import Exhibit, Section, StudyResults, Variant, every

Forms = Mapping[str, Mapping[str, Mapping[float, Variant]]]
"""By architecture ("sdm", "gdn", "full_attention", ...) and by the label of a form: its variants by learning rate."""
RULER = "RULER (13 tasks), 1.4B: SDM 31.2, GDN 20.0, full attention 32.5; 8B: 50.2, 34.2, 61.2"
SEQUENCES = {
    "sdm": "SDM, more slots",
    "gdn": "GDN, fewer and wider heads",
}


def recall_section(deviations: tuple[str, ...], forms: Forms, pairs: int, score: Score, chosen_by: str) -> Section:
    """Accuracy of recall against the number of pairs and the size of the state.

    Args:
        deviations: How the models and the task differ from the paper's.
        forms: The models.
        pairs: Number of key-value pairs that models are trained to and compared at.
        score: Chooses learning rates and forms.
        chosen_by: What the score is, in words.
    """

    def measured(results: StudyResults, variant: Variant) -> float | None:
        return score(results, variant) if results.summaries(variant, "recall") else None

    def choose(results: StudyResults, kind: str) -> list[Chosen]:
        """Every form of an architecture that has results, at its best learning rate."""
        chosen = (best_rate(results, rates, measured) for rates in forms[kind].values())
        return [model for model in chosen if model is not None]

    def best(models: Sequence[Chosen]) -> Variant | None:
        """The best of several forms."""
        return max(models, key=lambda model: model.score).variant if models else None

    accuracy = mean_cell(accuracy_at(pairs), "recall", percent=True, missing="-")

    def exhibit(results: StudyResults) -> Exhibit:
        chosen = {kind: choose(results, kind) for kind in forms}
        rates = {model.variant: model.rate() for group in chosen.values() for model in group}
        if not rates:
            return Exhibit()
        models = {kind: [model.variant for model in group] for kind, group in chosen.items()}
        state = {variant: facts.state_elements for variant in rates if (facts := results.facts(variant)) is not None}
        best_forms = {kind: variant for kind, group in chosen.items() if (variant := best(group)) is not None}
        sizes = [int(count) for count in results.summaries(next(iter(rates)), "recall")[0]["accuracy"]]
        by_pairs = {
            variant.label: [
                point for count in sizes for point in curve(results, {count: variant}, accuracy_at(count), "recall")
            ]
            for variant in best_forms.values()
        }
        by_state: dict[str, list[Point]] = {}
        for kind, variants in models.items():
            for variant in variants if kind in SEQUENCES else ():
                points = curve(results, {state[variant]: variant}, accuracy_at(pairs), "recall")
                by_state.setdefault(SEQUENCES[kind], []).extend(points)
        bands = "Bands: 95% intervals over seeds; models with one seed have none."
        figures = [
            (
                charts.recall_chart(by_pairs, pairs),
                f"The best form of each architecture: accuracy against the number of pairs K. Beyond K = {pairs} "
                f"models are tested on more pairs than they were trained on. {bands}",
            ),
            (
                charts.state_recall_chart(by_state, pairs, "state"),
                f"Accuracy at {pairs} pairs against the numbers of the state, at about equal FLOPs. {bands}",
            ),
        ]
        columns: dict[str, Cell] = {
            f"K={count}": mean_cell(accuracy_at(count), "recall", percent=True, missing="-") for count in sizes
        }
        columns |= {
            "lr": lambda results, variant: rates[variant],
            "seeds": seeds_cell("recall"),
            "steps": fact_cell(lambda facts: f"{facts.steps:,}"),
        }
        caption = f"{MEANS} GDN, HxK: H heads of key width K."
        by_size, growing = sorted(state, key=state.__getitem__), models.get("full_attention", ())
        largest = max(models.get("sdm") or every(models)[:1], key=state.__getitem__)
        flops = facts.flops_per_token if (facts := results.facts(largest)) is not None else 1
        size_columns: dict[str, Cell] = {
            "state": lambda results, variant: f"{state[variant]:,}{' (grows)' if variant in growing else ''}",
            "parameters": fact_cell(lambda facts: f"{facts.parameters:,}"),
            "M0": fact_cell(lambda facts: f"{facts.initial_state_parameters:,}"),
            "FLOPs": fact_cell(lambda facts: f"{facts.flops_per_token / flops - 1:+.1%}"),
            f"K={pairs}": accuracy,
        }
        size_caption = (
            "State: numbers kept behind the context. M0: numbers of the learned initial state, beside the parameters. "
            f"FLOPs per token, against {largest.label}."
        )
        tables = [
            table(results, "Recall: accuracy by the number of pairs K", rates, columns, caption),
            table(results, "Recall by the size of the state", by_size, size_columns, size_caption),
        ]
        swept = {label: by_rate for group in forms.values() for label, by_rate in group.items() if len(by_rate) > 1}
        if swept:
            columns_of = {lr: f"{lr:g}" for lr in sorted({lr for by_rate in swept.values() for lr in by_rate})}

            def cell(variant: Variant) -> str:
                return "-" if (value := score(results, variant)) is None else f"{value:.4f}"

            tables.append(grid_table("Sweep of the learning rate", swept, columns_of, cell, f"Shown: {chosen_by}."))
        notes = [
            f"The learning rate of each form, and the form of each architecture, is chosen by {chosen_by}.",
            "The claim is about a larger state at equal parameters and FLOPs, not about recall per number of state.",
            *(
                f"At an equal state of {state[sdm]:,} numbers: {sdm.label} {accuracy(results, sdm)}, "
                f"{gdn.label} {accuracy(results, gdn)}."
                for sdm in models.get("sdm", ())
                for gdn in models.get("gdn", ())
                if state[sdm] == state[gdn]
            ),
        ]
        words = [
            f"{variant.label} {accuracy(results, variant)} ({state[variant]:,} numbers of state"
            f"{', growing with the context' if kind == 'full_attention' else ''})"
            for kind, variant in best_forms.items()
        ]
        return Exhibit(tables, figures, notes, f"accuracy at {pairs} pairs: {', '.join(words)}")

    claim = accuracy_claim(
        f"best form of SDM - best form of GDN, accuracy at {pairs} pairs",
        "RULER, SDM - GDN: +11.2 points at 1.4B, +16.0 at 8B",
        lambda results: best(choose(results, "sdm")),
        lambda results: best(choose(results, "gdn")),
        accuracy_at(pairs),
        "recall",
    )
    return Section(
        "recall",
        "A larger state at equal cost recalls more",
        "A larger state at the same parameters and FLOPs per token improves long-context recall.",
        RULER,
        deviations,
        exhibit=exhibit,
        claims=(claim,),
        variants=every(forms),
        measurement="recall",
    )


def accuracy_section(
    section: Section, variants: Mapping[str, Variant], measurement: str, paper: str, caption: str
) -> Section:
    """The mean accuracy over the tasks of a measurement ("ruler" or "harness") for every architecture."""
    asked = all(measurement in variant.measurements for variant in variants.values())
    accuracy = mean_cell(task_accuracy, measurement, percent=True)

    def exhibit(results: StudyResults) -> Exhibit:
        if not asked:
            raise ImportError("lm-evaluation-harness is not installed (the extra `eval`)")
        models = [variant for variant in variants.values() if results.values(variant, task_accuracy, measurement)]
        columns = {"accuracy": accuracy, "seeds": seeds_cell(measurement)}
        made = table(results, section.title, variants.values(), columns, caption, "global layers")
        return Exhibit([made], summary=", ".join(f"{variant.label} {accuracy(results, variant)}" for variant in models))

    quantity = "SDM - GDN, mean accuracy of the tasks"
    claim = accuracy_claim(quantity, paper, variants["sdm"], variants["gdn"], task_accuracy, measurement)
    rests_on = tuple(variants.values()) if asked else ()
    return replace(section, exhibit=exhibit, claims=(claim,), variants=rests_on, measurement=measurement)


def task_accuracy(summary: Mapping[str, Any]) -> float | None:
    """The mean accuracy over the tasks that have one: of RULER, or of lm-evaluation-harness."""
    tasks = summary["tasks"].values()
    values = [task["accuracy"] if "accuracy" in task else task["metrics"].get("acc", {}).get("value") for task in tasks]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
