"""The paper's scaling ladder: sizes, learning rates and tokens of its table.

The paper names neither the number of tokens of a batch nor the lengths of warm-up and decay nor the weight decay; half
a million tokens, one percent, a fifth and 0.1 are this project's choices.
"""

from __future__ import annotations

import math

from sdm.data.config import CorpusConfig
from sdm.models.ladder import LEVELS
from sdm.training import (
    CheckpointConfig,
    ComputeConfig,
    ModelConfig,
    MonitorConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
    TrainingError,
)
from sdm.training.model_config import LayerType

SEQUENCE_LENGTH = 8192
BATCH_TOKENS = 2**19
# By the name that a recipe's name ends in.
GLOBAL_LAYERS: dict[str, LayerType] = {"sdm": "sdm", "gdn": "gdn", "mamba2": "mamba2", "attention": "full_attention"}


def ladder_run(level: int, global_layer: LayerType = "sdm") -> TrainConfig:
    """Pre-training of a level of the paper's ladder. Give it data: --data.sources and --data.tokenizer."""
    if level not in LEVELS:
        raise TrainingError(f"level must be one of {', '.join(map(str, LEVELS))}, got {level!r}")
    row = LEVELS[level]
    steps = math.ceil(row.tokens / BATCH_TOKENS)
    batch_size = BATCH_TOKENS // SEQUENCE_LENGTH
    return TrainConfig(
        model=ModelConfig(
            vocab_size=128_256,
            hidden_size=row.hidden_size,
            num_hidden_layers=row.num_hidden_layers,
            global_layer=global_layer,
            num_memory_heads=row.num_memory_heads,
            head_dim=128,
            intermediate_multiple=1024,
        ),
        data=CorpusConfig(sequence_length=SEQUENCE_LENGTH, batch_size=batch_size),
        optim=OptimConfig(lr=row.learning_rate),
        schedule=ScheduleConfig(steps=steps, warmup=steps // 100, decay=steps // 5),
        compute=ComputeConfig(precision="bfloat16", accumulation=batch_size, checkpointing="block"),
        checkpoint=CheckpointConfig(every=1000, keep=3),
        monitor=MonitorConfig(log_every=10, memory_every=100, validate_every=1000, validation_batches=4),
    )
