"""The paper's scaling ladder: sizes, learning rates and tokens of its table.

The paper's are also the sequences of 8192 tokens, AdamW's betas, the clipping, Warmup-Stable-Decay, and the tokens that
memory statistics rest on. A step has 2^21 tokens: the paper says that 10 steps are about 21M tokens at level 8, and
this project takes the same at the other levels. Where the paper is silent the choice is ours: warm-up over one percent
of the steps, a linear decay over the last fifth, a weight decay of 0.1 with its exemptions, eps, and the scale of M0.
"""

from __future__ import annotations

import math
from typing import Annotated

from typing_extensions import Doc

from sdm.data.config import CorpusConfig
from sdm.models.ladder import LEVELS
from sdm.models.model_config import ModelConfig
from sdm.reproduce.recipes.parameters import GlobalLayer
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, OptimConfig, ScheduleConfig, TrainConfig
from sdm.run.errors import TrainingError

SEQUENCE_LENGTH = 8192
BATCH_TOKENS = 2**21
STATISTICS_STEPS = 10
Level = Annotated[int, Doc(f"Level of the ladder: {', '.join(map(str, LEVELS))}.")]


def ladder(level: Level = 1, global_layer: GlobalLayer = "sdm") -> TrainConfig:
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
        monitor=MonitorConfig(
            log_every=10,
            memory_every=100,
            memory_tokens=STATISTICS_STEPS * BATCH_TOKENS,
            validate_every=1000,
            validation_batches=4,
        ),
    )
