"""Runs for a laptop: minutes on two cores."""

from __future__ import annotations

from sdm.data.config import CorpusConfig
from sdm.models.model_config import ModelConfig
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, OptimConfig, ScheduleConfig, TrainConfig


def tiny_code() -> TrainConfig:
    """A language model of the Python standard library: the paper's hybrid at width 128."""
    return _tiny("code")


def tiny_text() -> TrainConfig:
    """A language model of the State of the Union addresses."""
    return _tiny("text")


def _tiny(source: str) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(
            hidden_size=128,
            num_hidden_layers=4,
            sliding_window=64,
            num_slots=1024,
            num_writes=32,
            num_reads=32,
            tie_word_embeddings=True,
        ),
        data=CorpusConfig(sources=(source,), tokenizer="bpe:1024", sequence_length=1024, batch_size=4),
        optim=OptimConfig(lr=3e-3),
        schedule=ScheduleConfig(steps=1000, warmup=50),
        compute=ComputeConfig(),
        checkpoint=CheckpointConfig(every=200),
        monitor=MonitorConfig(log_every=10, memory_every=50, validate_every=200),
    )
