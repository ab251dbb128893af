"""`sdm reproduce heads`: one memory or four, at an equal state.

Four heads of N slots have the state of one head of N slots: each stores a quarter of the channels. They also write and
read four times as many slots. Both are separated here: one head with four times the writes and reads, and four heads
with a quarter of them, in recall, in `rebinding` and in models of code. A single head of as many slots as have equal
cost stands beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sdm.reproduce.forms import Form, Recipe, code_task, form_study, recall_task
from sdm.reproduce.recipes import tasks as recipes
from sdm.reproduce.recipes.mini import mini
from sdm.reproduce.study import NOT_REPORTED, Section, Study
from sdm.run.config import TrainConfig

STEPS = 300


def _form(label: str, heads: int, slots: int, accesses: int) -> Form:
    """A split of the memory into heads, with as many writes as reads of a token and head."""
    fields = {"num_memory_heads": heads, "num_slots": slots, "num_writes": accesses, "num_reads": accesses}
    return Form(label, fields)


SINGLE, FOUR = "one", "four"
FORMS = {
    SINGLE: _form("one head of 64 slots, W = R = 16", 1, 64, 16),
    "one-more": _form("one head of 64 slots, W = R = 64", 1, 64, 64),
    FOUR: _form("four heads of 64 slots, W = R = 16", 4, 64, 16),
    "four-fewer": _form("four heads of 64 slots, W = R = 4", 4, 64, 4),
    "one-large": _form("one head of 1,024 slots, W = R = 16", 1, 1024, 16),
}
COMPARED = (
    (FOUR, SINGLE),
    ("one-more", SINGLE),
    ("four-fewer", SINGLE),
    ("four-fewer", "one-more"),
    ("one-large", FOUR),
)


def _recall(base: Callable[..., TrainConfig], batch_size: int) -> Recipe:
    def recipe(fields: Mapping[str, Any], lr: float, seed: int) -> TrainConfig:
        config = base("sdm", lr=lr, steps=STEPS, seed=seed, batch_size=batch_size)
        return replace(config, model=replace(config.model, **fields))

    return recipe


def _code(fields: Mapping[str, Any], lr: float, seed: int) -> TrainConfig:
    return mini(lr=lr, seed=seed, model=fields)


RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
RECALL_BEST = dict.fromkeys(FORMS, 3e-3) | {FOUR: 1.2e-2, "four-fewer": 1.2e-2}
REBINDING_BEST = dict.fromkeys(FORMS, 3e-3) | {FOUR: 6e-3, "one-more": 6e-3}
TASKS = {
    "recall": recall_task("recall", FORMS, _recall(recipes.recall, 2), (256,), RECALL_BEST, (*RATES, 2.4e-2)),
    "rebinding": recall_task("rebinding", FORMS, _recall(recipes.rebinding, 4), (64,), REBINDING_BEST, RATES),
    "code": code_task("code", FORMS, _code, dict.fromkeys(FORMS, 5e-3)),
}


def heads_study() -> Study:
    """The study of `sdm reproduce heads`."""
    section = Section(
        "heads",
        "Heads at equal state",
        "The paper takes one head: fewer heads make a larger state at the same cost.",
        NOT_REPORTED,
        ("64 slots a head, 1,024 in the single head of equal cost",),
    )
    lead = (
        "Four heads of N slots recall more than one head of N slots, although their states are equal. Is it the "
        "separate addresses, or that four heads write and read four times as many slots?"
    )
    return form_study(section, lead, TASKS, COMPARED)
