"""Forms of a model, compared on several tasks at the best learning rate of each.

Every form is trained on every task with one seed at several learning rates, and with `SEEDS` seeds at the best. Rates
are chosen by the first seed, on other rows or documents than those of the results. `heads` and `rivals` are such
studies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdm.analysis import charts
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.position import Position, nats
from sdm.evaluation.recall import Recall
from sdm.evaluation.report import AnyChart, Point, Table
from sdm.reproduce.exhibits import (
    FLOPS,
    FORWARD,
    MEAN_95,
    NATS,
    PARAMETERS,
    STATE,
    Cell,
    Score,
    accuracy_at,
    accuracy_claim,
    best_rate,
    curve,
    loss_claim,
    mean_cell,
    negative_valid_loss,
    table,
)
from sdm.reproduce.recipes import mini as ladder
from sdm.reproduce.recipes import tasks as recipes
from sdm.reproduce.study import (
    NOT_REPORTED,
    WRITE_RULE,
    Claim,
    Exhibit,
    Section,
    Study,
    StudyResults,
    Variant,
    by_seed,
    every,
    sweep,
)
from sdm.run.config import TrainConfig

SEEDS = 3


@dataclass(frozen=True)
class Form:
    """A form of the model."""

    label: str
    model: Mapping[str, Any]
    """Fields of the model in which it differs from others."""


Recipe = Callable[[Mapping[str, Any], float, int], TrainConfig]
"""The configuration of a form's fields, at a learning rate, with a seed."""


@dataclass(frozen=True)
class Task:
    """Where forms are compared, and how."""

    title: str
    forms: Mapping[str, Form]
    """What is compared, by name."""
    recipe: Recipe
    rates: tuple[float, ...]
    best: Mapping[str, float]
    """The learning rate of each form that has several seeds: the best of the first seed by `score`."""
    measurements: Mapping[str, Measurement]
    measurement: str
    """The one of them that results are of."""
    score: Score
    """What rates are chosen by: of the first seed, the largest is taken."""
    columns: Mapping[str, Cell]
    """Results in the table; the last one is what forms are compared by."""
    claim: Callable[[str, Variant, Variant], Claim]
    """A difference of two forms; its quantity begins with the text."""
    deviations: tuple[str, ...]
    chart: Callable[[StudyResults, Sequence[Variant]], tuple[AnyChart, str]] | None = None
    """Makes a chart of the forms at their best rates, with its caption."""


Runs = Mapping[str, Mapping[float, Variant]]
"""By the name of the form: its variants by learning rate."""


def recall_task(
    title: str,
    forms: Mapping[str, Form],
    recipe: Recipe,
    sizes: tuple[int, ...],
    best: Mapping[str, float],
    rates: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3),
    by_state: bool = False,
) -> Task:
    """Recall of pairs: forms are compared at the largest of the sizes. `by_state` draws accuracy against the state."""
    pairs = sizes[-1]
    value = accuracy_at(pairs)

    def score(results: StudyResults, variant: Variant) -> float | None:
        return results.values(variant, value, "choice").get(0)

    def claim(text: str, first: Variant, second: Variant) -> Claim:
        return accuracy_claim(f"{text}, accuracy at {pairs} pairs", NOT_REPORTED, first, second, value, "recall")

    def chart(results: StudyResults, variants: Sequence[Variant]) -> tuple[AnyChart, str]:
        curves: dict[str, list[Point]] = {}
        for variant in variants:
            if (facts := results.facts(variant)) is not None:
                name, points = variant.label.partition(",")[0], {facts.state_elements: variant}
                curves.setdefault(name, []).extend(curve(results, points, value, "recall"))
        caption = f"Accuracy at {pairs} pairs against the numbers of the state, at about equal FLOPs. {MEAN_95}"
        return charts.state_recall_chart(curves, pairs, f"{title}-state"), caption

    measurements: dict[str, Measurement] = {
        "recall": Recall(sizes=sizes, rows=32),
        "choice": Recall(sizes=(pairs,), rows=32, seed=2),
    }
    columns = {f"{count} pairs": mean_cell(accuracy_at(count), "recall", percent=True) for count in sizes}
    return Task(
        title, forms, recipe, rates, best, measurements, "recall", score, columns, claim, recipes.DEVIATIONS,
        chart if by_state else None,
    )  # fmt: skip


def code_task(
    title: str,
    forms: Mapping[str, Form],
    recipe: Recipe,
    best: Mapping[str, float],
    rates: tuple[float, ...] = (2.5e-3, 5e-3, 1e-2),
) -> Task:
    """Loss of a model of code on held-out documents."""

    def claim(text: str, first: Variant, second: Variant) -> Claim:
        return loss_claim(first, second, quantity=f"{text}, {NATS}")

    measurements: dict[str, Measurement] = {"position": Position(gain=False)}
    columns = {NATS: mean_cell(nats)}
    return Task(
        title, forms, recipe, rates, best, measurements, "position", negative_valid_loss, columns, claim,
        ladder.DEVIATIONS,
    )  # fmt: skip


def form_runs(name: str, task: Task) -> Runs:
    """Every form at every rate; several seeds at the best."""

    def runs(key: str, form: Form) -> dict[float, Variant]:
        def recipe(*, lr: float, seed: int) -> TrainConfig:
            return task.recipe(form.model, lr, seed)

        made = sweep(f"{name}-{key}-lr{{lr:g}}-seed{{seed}}", form.label, task.rates, task.measurements, 1, recipe)
        return {lr: replace(variant, seeds=SEEDS) if lr == task.best[key] else variant for lr, variant in made.items()}

    return {key: runs(key, form) for key, form in task.forms.items()}


def form_study(section: Section, lead: str, tasks: Mapping[str, Task], compared: Sequence[tuple[str, str]]) -> Study:
    """A study of forms.

    Args:
        section: Key and title of the study, what the paper says, and how all forms differ from it.
        lead: What there is to know in a minute.
        tasks: Where forms are compared, by name.
        compared: Pairs of forms whose difference is shown with its interval.
    """
    runs = {name: form_runs(name, task) for name, task in tasks.items()}
    sections = tuple(_section(section, task, runs[name], compared) for name, task in tasks.items())
    groups = {name: every(group) for name, group in runs.items()}
    return Study(section.key, section.title, lead, groups, sections, round_of=by_seed)


def _section(section: Section, task: Task, runs: Runs, compared: Sequence[tuple[str, str]]) -> Section:
    chosen = {form: by_rate[task.best[form]] for form, by_rate in runs.items()}
    title = f"{section.title}: {task.title}"

    def exhibit(results: StudyResults) -> Exhibit:
        best = {form: best_rate(results, by_rate, task.score) for form, by_rate in runs.items()}
        if not any(best.values()):
            return Exhibit()
        columns: dict[str, Cell] = {
            "parameters": PARAMETERS,
            "state": STATE,
            "FLOPs": FLOPS,
            **task.columns,
            "rate": lambda results, variant: f"{variant.recipe(0).optim.lr:g}",
        }
        means = table(results, title, chosen.values(), columns, f"{MEAN_95} {FORWARD}")
        rows = []
        for form, by_rate in runs.items():
            scores = [task.score(results, variant) for variant in by_rate.values()]
            rate = "-" if (model := best[form]) is None else model.rate()
            rows.append((chosen[form].label, *("-" if score is None else f"{score:.3f}" for score in scores), rate))
        names = ("model", *(f"{rate:g}" for rate in task.rates), "best")
        caption = "Accuracy, or the loss negated, of seed 0 on rows that no result rests on."
        name, result = list(task.columns.items())[-1]
        measured = [variant for variant in chosen.values() if results.by_seed(variant, task.measurement)]
        words = f"{name}: " + "; ".join(f"{variant.label} {result(results, variant)}" for variant in measured)
        figures = [] if task.chart is None else [task.chart(results, list(chosen.values()))]
        return Exhibit([means, Table("Rates", names, rows, caption)], figures, summary=words)

    return replace(
        section,
        key=task.title.replace(" ", "-"),
        title=title,
        deviations=(WRITE_RULE, *task.deviations, *section.deviations),
        exhibit=exhibit,
        claims=[
            task.claim(f"{chosen[first].label} - {chosen[second].label}", chosen[first], chosen[second])
            for first, second in compared
            if {first, second} <= chosen.keys()
        ],
        variants=every(runs),
        measurement=task.measurement,
    )
