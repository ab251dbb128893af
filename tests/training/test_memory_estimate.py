"""The estimate of a run's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sdm.data import open_data
from sdm.errors import TrainingError
from sdm.models import cost
from sdm.models.model_config import ModelConfig
from sdm.run.config import (
    ComputeConfig,
    GuardConfig,
)
from sdm.run.mesh import Mesh
from sdm.training import Trainer, memory_estimate
from training.runs import recall_run, text_run


def test_refuses_what_cannot_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = recall_run(model=ModelConfig(hidden_size=4096, num_hidden_layers=400))
    with pytest.raises(TrainingError, match=r"needs about \d+.* GB .*Lower data.batch_size"):
        Trainer(large, tmp_path)
    monkeypatch.setattr(memory_estimate, "available_memory", lambda device: 1e6)
    with pytest.raises(TrainingError, match="free memory"):
        Trainer(recall_run(), tmp_path / "small")
    Trainer(recall_run(guard=GuardConfig(check_memory=False)), tmp_path / "forced").close()


def test_knows_what_checkpointing_saves(tmp_path: Path) -> None:
    def activations(mode: Any) -> float:
        config = text_run(tmp_path, "rows", compute=ComputeConfig(checkpointing=mode, segment_length=8))
        data = open_data(config.data)
        return memory_estimate.estimate(config, config.model.build(257), data, torch.device("cpu")).activations

    assert activations("segment") < activations("block") < activations("none")


def test_knows_what_ranks_share(tmp_path: Path) -> None:
    """A run that fits on a mesh is not refused for what one process would need."""
    config = text_run(tmp_path, "rows")
    data, model = open_data(config.data), config.model.build(257)

    def needs(**degrees: int) -> memory_estimate.Estimate:
        return memory_estimate.estimate(config, model, data, torch.device("cpu"), Mesh(**degrees))

    costs, one = cost(model), needs()
    logits = 4 * 3 * (model.loss_chunk_size or 0) * model.vocab_size
    assert needs(context=4).activations - logits == pytest.approx((one.activations - logits) / 4)
    assert needs(context=4).weights == one.weights / 4
    assert one.weights - needs(channel=2).weights == 16 * costs.initial_state_parameters / 2
    tables = 16 * data.batch_size * costs.state_elements
    assert one.activations - needs(channel=2).activations == pytest.approx(tables / 2)
