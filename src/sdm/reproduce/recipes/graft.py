"""Memories grafted onto a pretrained causal LM: `sdm train graft --base FOLDER --data.sources FILES`.

`pretrain` makes the small bases of `sdm reproduce graft`, and `adapt` the runs that start from them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Doc

from sdm.data.config import CorpusConfig
from sdm.reproduce.recipes.code import LENGTH, code_rows
from sdm.run.config import (
    AdaptConfig,
    CheckpointConfig,
    ComputeConfig,
    MonitorConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)

SHORT = 256
"""Tokens of the rows that the study's bases are trained on."""
WINDOW = 32
_WIDTH = 64
_SIZES: dict[str, bool | int | float | str] = {
    "hidden_size": _WIDTH,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # 0.8 / sqrt(d), as in plain_code
    "max_position_embeddings": 8192,
}
BASES: dict[str, dict[str, bool | int | float | str]] = {
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": WINDOW, **_SIZES},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 1, **_SIZES},
}


def graft(base: Annotated[Path | None, Doc("Folder of the pretrained causal LM, or of a run.")] = None) -> TrainConfig:
    """Sparse delta memories beside the attention of a pretrained causal LM, trained on long texts; needs --base."""
    return TrainConfig(
        data=CorpusConfig(
            tokenizer="byte" if base is None else str(_model_folder(base)),
            layout="stream",
            sequence_length=LENGTH,
            batch_size=4,
        ),
        optim=OptimConfig(lr=5e-3, weight_decay=0.0),
        schedule=ScheduleConfig(steps=500, warmup=20),
        monitor=MonitorConfig(log_every=10, memory_every=100, validate_every=100, validation_batches=8),
        checkpoint=CheckpointConfig(every=100),
        adapt=AdaptConfig(base=base),
    )


def _model_folder(path: Path) -> Path:
    """Where the tokenizer is: a finished run has it in its export."""
    exported = path / "export"
    return exported if exported.is_dir() else path


def _small(seed: int, steps: int, lr: float, length: int) -> TrainConfig:
    return TrainConfig(
        data=code_rows(seed=seed, sequence_length=length, batch_size=LENGTH // length),
        optim=OptimConfig(lr=lr, weight_decay=0.0),
        schedule=ScheduleConfig(steps=steps, warmup=min(20, steps // 10)),
        compute=ComputeConfig(threads=1),
        checkpoint=CheckpointConfig(every=256, keep=1),
        monitor=MonitorConfig(log_every=32, memory_every=0, validate_every=0, validation_batches=8),
        seed=seed,
    )


def pretrain(architecture: str, steps: int, seed: int = 0) -> TrainConfig:
    """A small base of the study: trained from random weights on rows of 256 tokens of code."""
    config = _small(seed, steps, 5e-3, SHORT)
    return replace(
        config,
        optim=OptimConfig(lr=5e-3, weight_decay=0.1),
        adapt=AdaptConfig(scratch=BASES[architecture], method="full"),
    )


def adapt(base: Path, steps: int, lr: float, seed: int, **fields: Any) -> TrainConfig:
    """A run of the study that starts from a base: rows of 2,048 tokens of the same code, in another order.

    Args:
        base: folder of the base's run.
        steps: of 2,048 tokens each.
        lr: highest learning rate.
        seed: of new weights and of the order of the rows.
        fields: of `AdaptConfig`.
    """
    return replace(_small(1000 + seed, steps, lr, LENGTH), adapt=AdaptConfig(base=base, **fields))
