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
from sdm.reproduce.exhibits import (
    FLOPS,
    FORWARD,
    MEAN_95,
    PARAMETERS,
    STATE,
    Cell,
    Model,
    accuracy_at,
    accuracy_claim,
    best_rate,
    choice_accuracy,
    mean_cell,
    table,
)
from sdm.reproduce.recipes.tasks import DEVIATIONS, rebinding, recall
from sdm.reproduce.study import WRITE_RULE, Claim, Exhibit, Section, Study, StudyResults, Variant, by_seed, every, sweep
from sdm.run.config import TrainConfig

SEEDS = 3
RATES = (1.5e-3, 3e-3, 6e-3)
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

    def config(form: Form, *, lr: float, seed: int) -> TrainConfig:
        made = recall if task == "recall" else rebinding
        base = made("sdm", lr=lr, steps=STEPS, seed=seed, batch_size=2 if task == "recall" else 4)
        fields = {"num_memory_heads": form.heads, "num_slots": form.slots}
        accesses = {"num_writes": form.accesses, "num_reads": form.accesses}
        return replace(base, model=replace(base.model, **fields, **accesses))

    return {
        name: sweep(f"{task}-{name}-lr{{lr:g}}-seed{{seed}}", form.label, rates, measurements, SEEDS, config, form)
        for name, form in FORMS.items()
    }


def heads_study(rates: tuple[float, ...] = RATES) -> Study:
    """The study of `sdm reproduce heads`."""
    runs = {task: variants(task, rates) for task in SIZES}
    groups = {task: every(forms) for task, forms in runs.items()}
    sections = tuple(_section(task, forms) for task, forms in runs.items())
    return Study("heads", "Heads at equal state", LEAD, groups, sections, round_of=by_seed)


def _section(task: str, forms: Runs) -> Section:
    value, score = accuracy_at(SIZES[task]), choice_accuracy(SIZES[task])
    accuracy = mean_cell(value, "recall", percent=True)

    def best(name: str) -> Model:
        return lambda results: None if (model := best_rate(results, forms[name], score)) is None else model.variant

    def against(name: str, other: str) -> Claim:
        quantity = f"{FORMS[name].label} - {FORMS[other].label}, accuracy at {SIZES[task]} pairs"
        paper = "not reported: the paper takes one head"
        return accuracy_claim(quantity, paper, best(name), best(other), value, "recall")

    def exhibit(results: StudyResults) -> Exhibit:
        chosen = [best_rate(results, rates, score) for rates in forms.values()]
        rates = {model.variant: model.rate() for model in chosen if model is not None}
        if not rates:
            return Exhibit()
        models = [
            next(iter(by_rate.values())) if model is None else model.variant
            for model, by_rate in zip(chosen, forms.values(), strict=True)
        ]
        columns: dict[str, Cell] = {
            "parameters": PARAMETERS,
            "state": STATE,
            "FLOPs": FLOPS,
            f"K = {SIZES[task]}": lambda results, variant: (
                accuracy(results, variant) if variant in rates else "missing"
            ),
            "rate": lambda results, variant: rates.get(variant, "-"),
        }
        caption = f"{MEAN_95} Rates are chosen on other rows. {FORWARD}"
        words = "; ".join(f"{variant.label} {accuracy(results, variant)}" for variant in rates)
        return Exhibit([table(results, f"Heads in {task}", models, columns, caption, "memory")], summary=words)

    compared = ((FOUR, SINGLE), ("one-more", SINGLE), ("four-fewer", SINGLE), ("one-large", FOUR))
    return Section(
        task,
        f"Heads in {task}",
        "The paper takes one head: fewer heads make a larger state at the same cost.",
        "not reported",
        (WRITE_RULE, *DEVIATIONS, "64 slots a head, 1,024 in the single head of equal cost"),
        exhibit=exhibit,
        claims=[against(*pair) for pair in compared],
        variants=every(forms),
        measurement="recall",
    )
