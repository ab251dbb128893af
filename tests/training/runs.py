"""Runs small enough to train in a second."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sdm.data import CorpusConfig, RecallConfig
from sdm.models.model_config import ModelConfig
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, ScheduleConfig, TrainConfig
from sdm.training import Trainer

MODEL = ModelConfig(
    hidden_size=16,
    num_hidden_layers=2,
    layer_types=("token_shift", "sdm"),
    intermediate_size=32,
    num_slots=16,
    num_writes=4,
    num_reads=4,
)
STEPS = 8


def recall_run(**sections: Any) -> TrainConfig:
    """MQAR of a few pairs."""
    config = TrainConfig(
        model=MODEL,
        data=RecallConfig(num_pairs=4, start_pairs=2, num_keys=8, num_values=4, batch_size=4),
        schedule=ScheduleConfig(steps=STEPS, warmup=2),
        compute=ComputeConfig(threads=1, device="cpu"),
        checkpoint=CheckpointConfig(every=3),
        monitor=MonitorConfig(log_every=2, memory_every=4, validate_every=4, validation_batches=1, display="none"),
    )
    return replace(config, **sections)


def text_run(folder: Path, layout: Any = "packed", **sections: Any) -> TrainConfig:
    """Bytes of a few files that are written into `folder`."""
    texts = folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    for number in range(12):
        (texts / f"{number}.txt").write_text(f"document {number}: " + "a memory of many slots. " * (4 + 3 * number))
    model = replace(MODEL, layer_types=("sliding_attention", "sdm"), sliding_window=8, num_attention_heads=2)
    data = CorpusConfig(
        sources=(str(texts),),
        layout=layout,
        sequence_length=32,
        batch_size=4,
        valid_fraction=0.2,
        test_fraction=0.1,
        cache_dir=folder / "cache",
    )
    return recall_run(**({"model": model, "data": data} | sections))


def train(config: TrainConfig, folder: Path) -> dict[str, torch.Tensor]:
    """The weights at the end of a run."""
    trainer = Trainer(config, folder)
    trainer.run()
    return {name: x.clone() for name, x in trainer.model.state_dict().items()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name
