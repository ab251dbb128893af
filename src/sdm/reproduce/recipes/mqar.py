"""Multi-query associative recall as Zoology defines it, on the models of the recall recipe.

Data, batches, epochs and the cosine schedule without warm-up are those of the published comparison; its learning rates
are 1e-3, 3.2e-3, 1e-2 and 3.2e-2. The models are this project's, and `recall.DEVIATIONS` says how they differ from the
paper's; weight decay and clipping are ours as well. 32 epochs are for a GPU: --schedule.steps and --data.batch-size
make it smaller.
"""

from __future__ import annotations

from dataclasses import replace

from sdm.data.mqar import MQARTaskConfig
from sdm.reproduce.recipes.parameters import GlobalLayer
from sdm.reproduce.recipes.recall import recall
from sdm.run.config import CheckpointConfig, ComputeConfig, GuardConfig, MonitorConfig, ScheduleConfig, TrainConfig

EPOCHS = 32


def mqar(global_layer: GlobalLayer = "sdm", *, lr: float = 10**-2.5, seed: int = 0) -> TrainConfig:
    """Zoology's MQAR, at its published settings, on a small model."""
    data = MQARTaskConfig(seed=seed)
    steps = EPOCHS * data.steps_per_epoch
    return replace(
        recall(global_layer, lr=lr, seed=seed),
        data=data,
        schedule=ScheduleConfig(steps=steps, warmup=0, decay=steps, shape="cosine"),
        compute=ComputeConfig(accumulation=4),
        checkpoint=CheckpointConfig(),
        monitor=MonitorConfig(validate_every=data.steps_per_epoch, validation_batches=2 * len(data.test_segments)),
        guard=GuardConfig(),
    )
