"""Every recipe by its name on the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from textwrap import wrap
from typing import get_args

from sdm.data.published_config import MADTask
from sdm.data.task_config import SyntheticTask
from sdm.models.ladder import LEVELS
from sdm.recipes.ladder import GLOBAL_LAYERS, ladder_run
from sdm.recipes.long_context import long_context
from sdm.recipes.mad import mad, synthetic
from sdm.recipes.mqar import mqar
from sdm.recipes.recall import recall
from sdm.recipes.tiny import tiny_code, tiny_text
from sdm.training import TrainConfig, TrainingError

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "tiny-code": tiny_code,
    "tiny-text": tiny_text,
    "recall": recall,
    "recall-gdn": partial(recall, "gdn", lr=5e-3),
    "recall-attention": partial(recall, "full_attention", lr=1.5e-3),
    **{f"synthetic-{task}": partial(synthetic, task) for task in get_args(SyntheticTask)},
    "mqar": mqar,
    "mqar-gdn": partial(mqar, "gdn"),
    "mqar-attention": partial(mqar, "full_attention"),
    **{f"mad-{task}": partial(mad, task) for task in get_args(MADTask)},
    "long-context": long_context,
    **{
        f"ladder-{level}" + ("" if kind == "sdm" else f"-{name}"): partial(ladder_run, level, kind)
        for level in LEVELS
        for name, kind in GLOBAL_LAYERS.items()
    },
}


def recipe(name: str) -> TrainConfig:
    """The configuration of a recipe."""
    if name not in RECIPES:
        raise TrainingError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]()


def describe(name: str) -> str:
    """The first line of a recipe's documentation."""
    return (_function(name).__doc__ or "").strip().splitlines()[0]


def listing(width: int = 79) -> str:
    """All names, those of one function together above what it says of itself."""
    groups: dict[Callable[..., TrainConfig], dict[str, str]] = {}
    for name in RECIPES:
        # The ladder has a name for every level: they are shown as one.
        groups.setdefault(_function(name), {})[re.sub(r"-\d+", "-LEVEL", name)] = name
    texts = []
    for names in groups.values():
        about = describe(next(iter(names.values())))
        if any("LEVEL" in shown for shown in names):
            about += f" LEVEL is one of {', '.join(map(str, LEVELS))}."
        lines = wrap(", ".join(names), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        lines += wrap(about, width, initial_indent="      ", subsequent_indent="      ")
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def _function(name: str) -> Callable[..., TrainConfig]:
    function = RECIPES[name]
    return function.func if isinstance(function, partial) else function
