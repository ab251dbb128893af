"""Fine-tuning on long sequences: `sdm train long-context --init-from RUN --sequence-length 131072`.

The paper fine-tunes its 1.4B and 8B models with 4B and 16B tokens of such sequences (`PAPER_TOKENS`). The recipe's 50
steps of one row, 6.6M tokens, are a miniature: `paper_steps` has the steps that the paper's budget takes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from typing_extensions import Doc

from sdm.data.config import CorpusConfig
from sdm.models.model_config import ModelConfig
from sdm.reproduce.recipes.tiny import tiny_code
from sdm.run import Run
from sdm.run.config import ScheduleConfig, TrainConfig
from sdm.run.errors import TrainingError
from sdm.run.model import SavedModel

LENGTH = 131_072
PAPER_TOKENS = {8: 4_000_000_000, 13: 16_000_000_000}  # by the level of the ladder


def paper_steps(level: int, batch_size: int = 1, sequence_length: int = LENGTH) -> int:
    """Steps of so many rows that the paper's fine-tuning of a level takes."""
    if level not in PAPER_TOKENS:
        raise TrainingError(f"level must be one of {', '.join(map(str, PAPER_TOKENS))}, got {level!r}")
    return math.ceil(PAPER_TOKENS[level] / (batch_size * sequence_length))


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
