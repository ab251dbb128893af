"""Published recall tasks on the models of the recall recipe: Zoology's MQAR and the synthetic tasks of MAD.

`mqar` has the data, batches, epochs and the cosine schedule without warm-up of Zoology's comparison, whose learning
rates are 1e-3, 3.2e-3, 1e-2 and 3.2e-2; weight decay and clipping are this project's. 32 epochs are for a GPU:
--schedule.steps and --data.batch-size make it smaller.

`mad` has MAD's data, batches, epochs, moments and cosine schedule, and the middle one of its learning rates (1e-4,
5e-4, 1e-3; it sweeps weight decays of 0 and 0.1 as well); clipping is this project's.

The models are this project's as well: `recall.DEVIATIONS` lists how they differ from the paper's.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sdm.data.mad import MADTask, MADTaskConfig
from sdm.data.mqar import MQARTaskConfig
from sdm.reproduce.recipes.parameters import GlobalLayer
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

MQAR_EPOCHS = 32
MAD_EPOCHS = 200
LAST_RATE = 1e-6
HELD_OUT_EXAMPLES = 1280


def mqar(global_layer: GlobalLayer = "sdm", *, lr: float = 10**-2.5, seed: int = 0) -> TrainConfig:
    """Zoology's MQAR, at its published settings, on a small model."""
    data = MQARTaskConfig(seed=seed)
    steps = MQAR_EPOCHS * data.steps_per_epoch
    return replace(
        recall(global_layer, lr=lr, seed=seed),
        data=data,
        schedule=ScheduleConfig(steps=steps, warmup=0, decay=steps, shape="cosine"),
        compute=ComputeConfig(accumulation=4),
        checkpoint=CheckpointConfig(),
        monitor=MonitorConfig(validate_every=data.steps_per_epoch, validation_batches=2 * len(data.test_segments)),
        guard=GuardConfig(),
    )


def mad(task: MADTask = "in-context-recall", *, lr: float = 5e-4, seed: int = 0) -> TrainConfig:
    """A task of MAD at its published settings, on a small model."""
    data = MADTaskConfig(task, seed=seed)
    steps = MAD_EPOCHS * math.ceil(data.examples / data.batch_size)
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
