"""The synthetic tasks of MAD on the model of the recall recipe, which says how it differs from the paper's."""

from __future__ import annotations

from dataclasses import replace

from sdm.data.config import MADConfig, MADTask
from sdm.recipes.mqar import mqar
from sdm.training import GuardConfig, TrainConfig


def mad(task: MADTask, batch_size: int = 32, seed: int = 0) -> TrainConfig:
    """A synthetic task of MAD at its baseline's size, on a small model."""
    data = MADConfig(task, batch_size=batch_size, seed=seed)
    return replace(mqar(seed=seed), data=data, guard=GuardConfig())
