"""The synthetic tasks of MAD on the model of the recall recipe.

`mad` has MAD's data, batches, epochs, moments and cosine schedule, and the middle one of its learning rates (1e-4,
5e-4, 1e-3; it sweeps weight decays of 0 and 0.1 as well). The model is this project's, and `recall.DEVIATIONS` says how
it differs from the paper's; clipping is ours.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sdm.data.mad import MADTask, MADTaskConfig
from sdm.reproduce.recipes.recall import recall
from sdm.run.config import (
    CheckpointConfig,
    ComputeConfig,
    GuardConfig,
    MonitorConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)

EPOCHS = 200
LAST_RATE = 1e-6
HELD_OUT_EXAMPLES = 1280


def mad(task: MADTask = "in-context-recall", *, lr: float = 5e-4, seed: int = 0) -> TrainConfig:
    """A task of MAD at its published settings, on a small model."""
    data = MADTaskConfig(task, seed=seed)
    steps = EPOCHS * math.ceil(data.examples / data.batch_size)
    return replace(
        recall(seed=seed),
        data=data,
        optim=OptimConfig(lr=lr, betas=(0.9, 0.999), weight_decay=0.0),
        schedule=ScheduleConfig(steps=steps, warmup=0, decay=steps, shape="cosine", final=LAST_RATE / lr),
        compute=ComputeConfig(),
        checkpoint=CheckpointConfig(),
        monitor=MonitorConfig(validation_batches=HELD_OUT_EXAMPLES // data.batch_size),
        guard=GuardConfig(),
    )
