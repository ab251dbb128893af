"""`sdm reproduce heads`: one memory or four, at an equal state.

Four heads of N slots have the state of one head of N slots: each stores a quarter of the channels. They also write and
read four times as many slots. Both are separated here: one head with four times the writes and reads, and four heads
with a quarter of them, in recall and in `rebinding`. A single head of as many slots as have equal cost stands beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sdm.evaluation.measurement import Measurement
from sdm.evaluation.recall import Recall
from sdm.evaluation.report import Table
from sdm.reproduce.recipes.tasks import DEVIATIONS, rebinding, recall
from sdm.reproduce.study import (
    WRITE_RULE,
    Claim,
    Difference,
    Exhibit,
    Section,
    Study,
    StudyResults,
    SummaryValue,
    Variant,
    shown,
)
from sdm.run.config import TrainConfig

SEEDS = 3
RATES = (1.5e-3, 3e-3, 6e-3)
MIDDLE = RATES[1]
SIZES = {"recall": 256, "rebinding": 64}
"""By task: the pairs that models are trained to and compared at."""
STEPS = 300


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
Runs = Mapping[str, Mapping[float, Variant]]
"""By the name of the form: its variants by learning rate."""
LEAD = (
    "Four heads of N slots recall more than one head of N slots, although their states are equal. Is it the separate "
    "addresses, or that four heads write and read four times as many slots?"
)


def variants(task: str, rates: tuple[float, ...]) -> Runs:
    """Every form at every rate."""
    measurements: dict[str, Measurement] = {
        "recall": Recall(sizes=(SIZES[task],), rows=32),
        "choice": Recall(sizes=(SIZES[task],), rows=32, seed=2),
    }

    def config(form: Form, lr: float, seed: int) -> TrainConfig:
        made = recall if task == "recall" else rebinding
        base = made("sdm", lr=lr, steps=STEPS, seed=seed, batch_size=2 if task == "recall" else 4)
        fields = {"num_memory_heads": form.heads, "num_slots": form.slots}
        accesses = {"num_writes": form.accesses, "num_reads": form.accesses}
        return replace(base, model=replace(base.model, **fields, **accesses))

    def variant(name: str, lr: float) -> Variant:
        run = f"{task}-{name}-lr{lr:g}-seed{{seed}}"
        return Variant(run, FORMS[name].label, lambda seed: config(FORMS[name], lr, seed), measurements, SEEDS)

    return {name: {lr: variant(name, lr) for lr in rates} for name in FORMS}


def heads_study(rates: tuple[float, ...] = RATES) -> Study:
    """The study of `sdm reproduce heads`."""
    runs = {task: variants(task, rates) for task in SIZES}
    groups = {task: [one for group in forms.values() for one in group.values()] for task, forms in runs.items()}
    sections = tuple(_section(task, forms) for task, forms in runs.items())
    return Study("heads", "Heads at equal state", LEAD, groups, sections, by_seed=True)


def accuracy(task: str) -> SummaryValue:
    """Accuracy at the size that models are trained to."""
    return lambda summary: summary["accuracy"].get(str(SIZES[task]))


def best(results: StudyResults, rates: Mapping[float, Variant], task: str) -> tuple[float, Variant] | None:
    """The rate with the highest accuracy on rows that no shown number rests on, and its variant."""
    scores = {
        lr: mean.value
        for lr, variant in rates.items()
        if (mean := results.mean(variant, accuracy(task), "choice")) is not None
    }
    if not scores:
        return None
    lr = max(scores, key=lambda rate: (scores[rate], rate == MIDDLE))
    return lr, rates[lr]


def _section(task: str, forms: Runs) -> Section:
    def against(name: str, other: str) -> Claim:
        def difference(results: StudyResults) -> Difference | None:
            ours, theirs = (best(results, forms[form], task) for form in (name, other))
            if ours is None or theirs is None:
                return None
            return results.paired_seeds(ours[1], theirs[1], accuracy(task), "recall")

        quantity = f"{FORMS[name].label} - {FORMS[other].label}, accuracy at {SIZES[task]} pairs (points)"
        return Claim(quantity, "not reported: the paper takes one head", difference, "above", percent=True)

    def exhibit(results: StudyResults) -> Exhibit:
        rows, words = [], []
        for name, rates in forms.items():
            chosen = best(results, rates, task)
            cost, length = next(iter(rates.values())).cost()
            sizes = (f"{cost.parameters:,}", f"{cost.state_elements:,}")
            flops = f"{cost.training_flops_per_token(length) // 3:,}"
            if chosen is None:
                rows.append((FORMS[name].label, *sizes, flops, "missing", "-"))
                continue
            mean = results.mean(chosen[1], accuracy(task), "recall")
            edge = " (edge)" if len(rates) > 1 and chosen[0] in (min(rates), max(rates)) else ""
            rows.append((FORMS[name].label, *sizes, flops, shown(mean, 1, percent=True), f"{chosen[0]:g}{edge}"))
            words.append(f"{FORMS[name].label} {shown(mean, 1, percent=True)}")
        if not words:
            return Exhibit()
        columns = ("memory", "parameters", "state", "FLOPs", f"K = {SIZES[task]}", "rate")
        caption = "Mean over seeds with its 95% interval. Rates are chosen on other rows. FLOPs of a token, forward."
        return Exhibit([Table(f"Heads in {task}", columns, rows, caption)], summary="; ".join(words))

    section = Section(
        task,
        f"Heads in {task}",
        "The paper takes one head: fewer heads make a larger state at the same cost.",
        "not reported",
        (WRITE_RULE, *DEVIATIONS, "64 slots a head, 1,024 in the single head of equal cost"),
    )
    claims = [
        against(FOUR, SINGLE),
        against("one-more", SINGLE),
        against("four-fewer", SINGLE),
        against("one-large", FOUR),
    ]
    every = [one for group in forms.values() for one in group.values()]
    return replace(section, exhibit=exhibit, claims=claims, variants=every, measurement="recall")
