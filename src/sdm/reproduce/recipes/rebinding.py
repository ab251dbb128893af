"""Recall of the last of several values of a key, and of needles in a haystack, on the models of the recall recipe.

Both are this project's own tasks. `recall.DEVIATIONS` says how the models differ from the paper's.
"""

from __future__ import annotations

from dataclasses import replace

from sdm.data.config import NeedleConfig, RebindingConfig
from sdm.reproduce.recipes.parameters import GlobalLayer
from sdm.reproduce.recipes.recall import recall
from sdm.run.config import TrainConfig


def rebinding(
    global_layer: GlobalLayer = "sdm",
    *,
    lr: float | None = None,
    steps: int = 600,
    seed: int = 0,
    batch_size: int = 8,
    num_pairs: int = 64,
    num_bindings: int = 4,
) -> TrainConfig:
    """Recall of keys that are bound several times, the last value counts; minutes on a laptop."""
    data = RebindingConfig(num_pairs=num_pairs, num_bindings=num_bindings, batch_size=batch_size, seed=seed)
    return replace(recall(global_layer, lr=lr, steps=steps, seed=seed), data=data)


def needle(
    global_layer: GlobalLayer = "sdm",
    *,
    lr: float | None = None,
    steps: int = 600,
    seed: int = 0,
    batch_size: int = 4,
    sequence_length: int = 1024,
) -> TrainConfig:
    """A few pairs hidden in a long row of filler, asked for at its end; minutes on a laptop."""
    data = NeedleConfig(sequence_length=sequence_length, batch_size=batch_size, seed=seed)
    return replace(recall(global_layer, lr=lr, steps=steps, seed=seed), data=data)
