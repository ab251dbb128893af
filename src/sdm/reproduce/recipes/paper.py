"""The paper's own recipes: its scaling ladder, and fine-tuning on long sequences.

The ladder has the sizes, learning rates and tokens of the paper's table. The paper's are also the sequences of 8192
tokens, AdamW's betas, the clipping, Warmup-Stable-Decay, and the tokens that memory statistics rest on. A step has 2^21
tokens: the paper says that 10 steps are about 21M tokens at level 8, and this project takes the same at the other
levels. Where the paper is silent the choice is ours: warm-up over one percent of the steps, a linear decay over the
last fifth, a weight decay of 0.1 with its exemptions, eps, and the scale of M0.

The paper fine-tunes its 1.4B and 8B models with 4B and 16B tokens of long sequences (`PAPER_TOKENS`). The recipe's 50
steps of one row, 6.6M tokens, are a miniature: `paper_steps` has the steps that the paper's budget takes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from typing_extensions import Doc

from sdm.data.config import CorpusConfig
from sdm.errors import TrainingError
from sdm.models.cost import LEVELS
from sdm.models.model_config import ModelConfig
from sdm.reproduce.recipes import GlobalLayer
from sdm.reproduce.recipes.code import tiny_code
from sdm.run import Run
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, OptimConfig, ScheduleConfig, TrainConfig
from sdm.run.model import SavedModel

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


LENGTH = 131_072
PAPER_TOKENS = {8: 4_000_000_000, 13: 16_000_000_000}  # by the level of the ladder


def paper_steps(level: int, batch_size: int = 1) -> int:
    """Steps of so many rows of 131,072 tokens that the paper's fine-tuning of a level takes."""
    if level not in PAPER_TOKENS:
        raise TrainingError(f"level must be one of {', '.join(map(str, PAPER_TOKENS))}, got {level!r}")
    return math.ceil(PAPER_TOKENS[level] / (batch_size * LENGTH))


def long_context(
    init_from: Annotated[Path | None, Doc("The run to start from, or a model's folder.")] = None,
    sequence_length: Annotated[int, Doc("Tokens of a sequence.")] = LENGTH,
) -> TrainConfig:
    """Fine-tuning of a trained model on sequences of 131072 tokens, in miniature; needs --init-from."""
    if init_from is None:
        return lengthen(tiny_code(), sequence_length)
    return continue_from(tiny_code(), init_from, sequence_length)


def lengthen(config: TrainConfig, sequence_length: int, steps: int = 50) -> TrainConfig:
    """A run's configuration for long sequences: a tenth of the learning rate, one row per step, documents one after the
    other, and memory for one segment of 8192 tokens however long the sequence."""
    if not isinstance(config.data, CorpusConfig):
        raise TrainingError("init_from: only runs on text can be fine-tuned on long sequences")
    checkpointing: Literal["block", "segment"] = "block" if config.unbounded_layers() else "segment"
    return replace(
        config,
        data=replace(config.data, layout="rows", sequence_length=sequence_length, batch_size=1),
        optim=replace(config.optim, lr=config.optim.lr / 10),
        schedule=ScheduleConfig(steps=steps, warmup=steps // 10),
        compute=replace(config.compute, accumulation=1, checkpointing=checkpointing),
        monitor=replace(config.monitor, log_every=1, memory_every=10, validate_every=0, validation_batches=1),
        checkpoint=replace(config.checkpoint, every=10),
    )


def continue_from(default: TrainConfig, init_from: Path, sequence_length: int) -> TrainConfig:
    """The recipe with the model and the data of the run that it starts from; and with sequences of this length."""
    saved, run = SavedModel(init_from), Run.around(init_from)
    if run is not None:
        config = run.config()
    else:
        config = replace(default, model=ModelConfig.of(saved.config()))
    if isinstance(config.data, CorpusConfig):
        # The very tokenizer of the model: a BPE trained anew on changed text would be another one.
        config = replace(config, data=replace(config.data, tokenizer=str(saved.folder)))
    return lengthen(replace(config, init_from=init_from), sequence_length)
