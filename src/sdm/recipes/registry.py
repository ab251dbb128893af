"""Every recipe by its name on the command line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    function = RECIPES[name]
    documented = function.func if isinstance(function, partial) else function
    return (documented.__doc__ or "").strip().splitlines()[0]
