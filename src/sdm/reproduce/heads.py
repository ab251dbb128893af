"""`sdm reproduce heads`: one memory or four, at an equal state.

Four heads of N slots have the state of one head of N slots: each stores a quarter of the channels. They also write and
read four times as many slots. Both are separated here: one head with four times the writes and reads, and four heads
with a quarter of them, in recall, in `rebinding` and in models of code. A single head of as many slots as have equal
cost stands beside. Every form is trained with one seed at several learning rates, and with `SEEDS` seeds at the best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from sdm.evaluation.measurement import Measurement
from sdm.evaluation.position import Position
from sdm.evaluation.recall import Recall
from sdm.evaluation.report import Table
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
    loss_claim,
    mean_cell,
    negative_valid_loss,
    table,
)
from sdm.reproduce.recipes import mini as ladder
from sdm.reproduce.recipes import tasks
from sdm.reproduce.study import WRITE_RULE, Claim, Exhibit, Section, Study, StudyResults, Variant, by_seed, every, sweep
from sdm.run.config import TrainConfig

SEEDS = 3
STEPS = 300
PAPER = "not reported: the paper takes one head"


@dataclass(frozen=True)
class Form:
    """A split of the memory into heads."""

    label: str
    heads: int
    slots: int
    accesses: int
    """Writes, and as many reads, of a token and head."""


SINGLE, FOUR = "one", "four"
FORMS = {
    SINGLE: Form("one head of 64 slots, W = R = 16", 1, 64, 16),
    "one-more": Form("one head of 64 slots, W = R = 64", 1, 64, 64),
    FOUR: Form("four heads of 64 slots, W = R = 16", 4, 64, 16),
    "four-fewer": Form("four heads of 64 slots, W = R = 4", 4, 64, 4),
    "one-large": Form("one head of 1,024 slots, W = R = 16", 1, 1024, 16),
}
COMPARED = (
    (FOUR, SINGLE),
    ("one-more", SINGLE),
    ("four-fewer", SINGLE),
    ("four-fewer", "one-more"),
    ("one-large", FOUR),
)
Runs = Mapping[str, Mapping[float, Variant]]
"""By the name of the form: its variants by learning rate."""
LEAD = (
    "Four heads of N slots recall more than one head of N slots, although their states are equal. Is it the separate "
    "addresses, or that four heads write and read four times as many slots?"
)


Fields = Mapping[str, int]
"""Fields of a model in which a form differs."""


@dataclass(frozen=True)
class Task:
    """Where the forms are compared, and how."""

    title: str
    recipe: Callable[[Fields, float, int], TrainConfig]
    """The configuration of a form, at a learning rate, with a seed."""
    rates: tuple[float, ...]
    best: Mapping[str, float]
    """The learning rate of each form that has several seeds: the best of the first seed by `score`."""
    measurements: Mapping[str, Measurement]
    score: Score
    """What rates are chosen by, on other rows than results: of the first seed."""
    column: str
    cell: Cell
    claim: Callable[[str, Variant, Variant], Claim]
    """A difference of two forms; its quantity begins with the text."""
    deviations: tuple[str, ...]
    measurement: str


def _form_config(base: TrainConfig, fields: Fields) -> TrainConfig:
    return replace(base, model=replace(base.model, **fields))


def _recall_task(
    title: str, base: Callable[..., TrainConfig], pairs: int, batch_size: int, best: Mapping[str, float]
) -> Task:
    value = accuracy_at(pairs)

    def recipe(fields: Fields, lr: float, seed: int) -> TrainConfig:
        return _form_config(base("sdm", lr=lr, steps=STEPS, seed=seed, batch_size=batch_size), fields)

    def score(results: StudyResults, variant: Variant) -> float | None:
        return results.values(variant, value, "choice").get(0)

    def claim(text: str, first: Variant, second: Variant) -> Claim:
        return accuracy_claim(f"{text}, accuracy at {pairs} pairs", PAPER, first, second, value, "recall")

    measurements: dict[str, Measurement] = {
        "recall": Recall(sizes=(pairs,), rows=32),
        "choice": Recall(sizes=(pairs,), rows=32, seed=2),
    }
    cell = mean_cell(value, "recall", percent=True)
    rates = (1.5e-3, 3e-3, 6e-3)
    column = f"{pairs} pairs"
    return Task(title, recipe, rates, best, measurements, score, column, cell, claim, tasks.DEVIATIONS, "recall")


def _code_task(best: Mapping[str, float]) -> Task:
    def recipe(fields: Fields, lr: float, seed: int) -> TrainConfig:
        return ladder.mini(lr=lr, seed=seed, model=fields)

    def claim(text: str, first: Variant, second: Variant) -> Claim:
        # A smaller loss is what the forms that are named first are expected to have.
        return loss_claim(first, second, PAPER, quantity=f"{text}, {NATS}")

    measurements: dict[str, Measurement] = {"position": Position(gain=False)}
    rates = (2.5e-3, 5e-3, 1e-2)
    return Task(
        "code", recipe, rates, best, measurements, negative_valid_loss, NATS, mean_cell(), claim, ladder.DEVIATIONS,
        "position",
    )  # fmt: skip


TASKS = {
    "recall": _recall_task("recall", tasks.recall, 256, 2, dict.fromkeys(FORMS, 3e-3)),
    "rebinding": _recall_task("rebinding", tasks.rebinding, 64, 4, dict.fromkeys(FORMS, 3e-3)),
    "code": _code_task(dict.fromkeys(FORMS, 5e-3)),
}


def variants(name: str) -> Runs:
    """Every form at every rate; several seeds at the best."""
    task = TASKS[name]

    def runs(form: str) -> dict[float, Variant]:
        of = FORMS[form]
        accesses = {"num_writes": of.accesses, "num_reads": of.accesses}
        fields = {"num_memory_heads": of.heads, "num_slots": of.slots, **accesses}

        def recipe(*, lr: float, seed: int) -> TrainConfig:
            return task.recipe(fields, lr, seed)

        made = sweep(f"{name}-{form}-lr{{lr:g}}-seed{{seed}}", of.label, task.rates, task.measurements, 1, recipe)
        return {lr: replace(variant, seeds=SEEDS) if lr == task.best[form] else variant for lr, variant in made.items()}

    return {form: runs(form) for form in FORMS}


def heads_study() -> Study:
    """The study of `sdm reproduce heads`."""
    runs = {name: variants(name) for name in TASKS}
    groups = {name: every(forms) for name, forms in runs.items()}
    sections = tuple(_section(TASKS[name], forms) for name, forms in runs.items())
    return Study("heads", "Heads at equal state", LEAD, groups, sections, round_of=by_seed)


def _section(task: Task, forms: Runs) -> Section:
    chosen = {form: by_rate[task.best[form]] for form, by_rate in forms.items()}

    def exhibit(results: StudyResults) -> Exhibit:
        best = {form: best_rate(results, by_rate, task.score) for form, by_rate in forms.items()}
        if not any(best.values()):
            return Exhibit()
        columns: dict[str, Cell] = {
            "parameters": PARAMETERS, "state": STATE, "FLOPs": FLOPS, task.column: task.cell,
            "rate": lambda results, variant: f"{variant.recipe(0).optim.lr:g}",
        }  # fmt: skip
        means = table(results, f"Heads in {task.title}", chosen.values(), columns, f"{MEAN_95} {FORWARD}", "memory")
        rows = []
        for form, by_rate in forms.items():
            scores = [task.score(results, variant) for variant in by_rate.values()]
            rate = "-" if (model := best[form]) is None else model.rate()
            rows.append((FORMS[form].label, *("-" if score is None else f"{score:.3f}" for score in scores), rate))
        names = ("memory", *(f"{rate:g}" for rate in task.rates), "best")
        caption = "Accuracy, or the loss negated, of seed 0 on rows that no result rests on."
        words = "; ".join(f"{variant.label} {task.cell(results, variant)}" for variant in chosen.values())
        return Exhibit([means, Table("Rates", names, rows, caption)], summary=words)

    return Section(
        task.title,
        f"Heads in {task.title}",
        "The paper takes one head: fewer heads make a larger state at the same cost.",
        "not reported",
        (WRITE_RULE, *task.deviations, "64 slots a head, 1,024 in the single head of equal cost"),
        exhibit=exhibit,
        claims=[
            task.claim(f"{FORMS[first].label} - {FORMS[second].label}", chosen[first], chosen[second])
            for first, second in COMPARED
        ],
        variants=every(forms),
        measurement=task.measurement,
    )
