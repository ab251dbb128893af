from __future__ import annotations

import os
import re
import time
from dataclasses import replace
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
from sdm.training import Trainer, estimate
from training.runs import assert_same, recall_run, text_run, train


def test_refuses_what_cannot_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = recall_run(model=ModelConfig(hidden_size=4096, num_hidden_layers=400))
    with pytest.raises(TrainingError, match=r"needs about \d+.* GB .*Lower data.batch_size"):
        Trainer(large, tmp_path)
    monkeypatch.setattr(estimate, "available_memory", lambda device: 1e6)
    with pytest.raises(TrainingError, match="free memory"):
        Trainer(recall_run(), tmp_path / "small")
    Trainer(recall_run(guard=GuardConfig(check_memory=False)), tmp_path / "forced").close()


def test_knows_what_checkpointing_saves(tmp_path: Path) -> None:
    def activations(mode: Any) -> float:
        config = text_run(tmp_path, "rows", compute=ComputeConfig(checkpointing=mode, segment_length=8))
        data = open_data(config.data)
        return estimate.estimate_memory(config, config.model.build(257), data, torch.device("cpu")).activations

    assert activations("segment") < activations("block") < activations("none")


def test_knows_what_ranks_share(tmp_path: Path) -> None:
    """A run that fits on a mesh is not refused for what one process would need."""
    config = text_run(tmp_path, "rows")
    data, model = open_data(config.data), config.model.build(257)

    def needs(**degrees: int) -> estimate.MemoryEstimate:
        return estimate.estimate_memory(config, model, data, torch.device("cpu"), Mesh(**degrees))

    costs, one = cost(model), needs()
    logits = 4 * 3 * (model.loss_chunk_size or 0) * model.vocab_size
    assert needs(context=4).activations - logits == pytest.approx((one.activations - logits) / 4)
    assert needs(context=4).weights == one.weights / 4
    assert one.weights - needs(channel=2).weights == 16 * costs.initial_state_parameters / 2
    tables = 16 * data.batch_size * costs.state_elements
    assert one.activations - needs(channel=2).activations == pytest.approx(tables / 2)


@pytest.mark.parametrize("layout", ["recall", "packed", "rows", "stream"])
def test_the_time_is_said_before_a_run_and_changes_nothing(
    tmp_path: Path, layout: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recall_run() if layout == "recall" else text_run(tmp_path, layout)
    config = replace(config, model=replace(config.model, normalize_scores=True))
    expected = train(config, tmp_path / "silent")
    caplog.set_level("INFO", "sdm.training")
    for flops in (1e11, 1.0):  # whole pieces, and cut ones
        monkeypatch.setattr(estimate, "FLOPS", flops)
        folder = tmp_path / f"said-{flops}"
        assert_same(train(replace(config, monitor=replace(config.monitor, display="plain")), folder), expected)
        assert re.search(r"about \d+ seconds for 8 steps", caplog.text)


def test_durations_in_words() -> None:
    seconds = [0.2, 45, 150, 5900, 7200, 86400 * 3, 86400 * 365 * 20]
    words = ["1 seconds", "45 seconds", "2.5 minutes", "1.6 hours", "2 hours", "3 days", "7,300 days"]
    assert [estimate.about(value) for value in seconds] == [f"about {value}" for value in words]


@pytest.mark.parametrize(("load", "share", "said"), [(6.0, 0.3, True), (6.0, 0.95, False), (1.5, 0.3, False)])
def test_taken_cores_are_noticed(
    tmp_path: Path,
    load: float,
    share: float,
    said: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    clock = time.perf_counter
    monkeypatch.setattr(time, "thread_time", lambda: share * clock())
    config = recall_run()
    train(replace(config, monitor=replace(config.monitor, display="plain")), tmp_path)
    text = f"oversubscribed: load average {load} on 2 cores, and steps compute for {share:.0%} of the time only"
    assert (text in caplog.text) == said
    assert ("oversubscribed" in caplog.text) == said


def test_a_system_without_a_load_average(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("no load average")

    monkeypatch.setattr(os, "getloadavg", missing)
    assert estimate.oversubscription(0.1) is None
