"""What stops a run: numbers that are not finite, and losses that explode."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdm.run.config import (
    CheckpointConfig,
    GuardConfig,
    MonitorConfig,
    ScheduleConfig,
)
from sdm.signals import TrainingStopped
from sdm.training import Trainer
from sdm.training.guards import Guard
from tiny_models import tiny_model
from training.runs import MODEL, recall_run


def test_guard_stops_at_what_is_not_finite() -> None:
    model = tiny_model()
    for x in model.parameters():
        x.grad = torch.zeros_like(x)
    model.model.layers[1].mlp.up_proj.weight.grad[0, 0] = math.nan
    with pytest.raises(TrainingStopped, match=r"step 5: .*nan.*layers.1.mlp.up_proj.weight\. ask"):
        Guard(GuardConfig()).check(5, 1.0, math.nan, model, lambda: "ask")
    model.model.norm.weight.data[0] = math.inf
    with pytest.raises(TrainingStopped, match=r"Weights that are not finite: model.norm.weight"):
        Guard(GuardConfig()).check(5, math.inf, 1.0, model, lambda: "ask")


def test_guard_stops_at_a_lasting_spike_only() -> None:
    guard, model = Guard(GuardConfig(patience=3)), torch.nn.Linear(1, 1)
    for step in range(40):
        guard.check(step, 2.0 + 0.1 * (step % 3), 1.0, model, str)
    for _ in range(5):
        guard.check(40, 9.0, 1.0, model, str)
        guard.check(41, 2.0, 1.0, model, str)
    again = Guard(guard.config)
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for one in (guard, again):
        one.check(42, 9.0, 1.0, model, str)
        one.check(43, 9.0, 1.0, model, str)
        with pytest.raises(TrainingStopped, match=r"for 3 steps and is 9\.000"):
            one.check(44, 9.0, 1.0, model, str)


def test_a_run_with_nan_stops_with_good_weights(tmp_path: Path) -> None:
    trainer = Trainer(recall_run(), tmp_path)
    for _ in range(3):
        trainer.train_step()
    trainer.save()
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: grad * math.nan)
    named = r"gradients that are not: model.layers.0.mlp.up_proj.weight\. The last good checkpoint is .*step-00000003;"
    with pytest.raises(TrainingStopped, match=named):
        trainer.train_step()
    assert torch.equal(trainer.model.lm_head.weight, before)
    trainer.close()


@pytest.mark.parametrize("every", [1, 1000])
@pytest.mark.parametrize("kind", ["gdn", "sdm", "mamba2"])
def test_ops_that_refuse_what_is_not_finite(tmp_path: Path, kind: str, every: int) -> None:
    """They see it before the loss is known, in training or in validation; the diagnosis is the same."""
    model = replace(MODEL, layer_types=("token_shift", kind))
    monitor = MonitorConfig(display="none", validate_every=every, validation_batches=1)
    trainer = Trainer(recall_run(model=model, monitor=monitor), tmp_path)
    trainer.train_step()
    trainer.save()

    def overflow(*arguments: Any) -> None:
        with torch.no_grad():
            trainer.model.model.layers[1].mixer.decay_bias.fill_(math.nan)

    hook = trainer.optimizer.register_step_post_hook(overflow)
    with pytest.raises(TrainingStopped, match=r"step [23].*not finite: model.layers.1.mixer.*step-00000001; a lower"):
        trainer.run()
    hook.remove()
    assert trainer.store.steps() == [1]


def test_what_is_not_finite_is_found_between_finite_weights(tmp_path: Path) -> None:
    trainer = Trainer(recall_run(model=replace(MODEL, layer_types=("token_shift", "gdn"))), tmp_path)
    with torch.no_grad():
        trainer.model.model.layers[1].mixer.decay_proj.weight.fill_(3e38)
    found = r"step 1: log_decay .*nan\. The weights are finite; the output of model.layers.1.mixer.decay_proj is not"
    with pytest.raises(TrainingStopped, match=found):
        trainer.run()
    again = Trainer(recall_run(), tmp_path / "other")
    again._loss = lambda *arguments: torch.zeros(2) @ torch.zeros(3)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        again.run()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    trainer = Trainer(recall_run(), tmp_path)
    trainer.train_step()
    trainer.save()
    trainer.step += 1
    trainer.model.lm_head.weight.data[0] = math.inf
    with pytest.raises(TrainingStopped, match=r"step 2 is not saved.*lm_head.weight.*step-00000001"):
        trainer.save()
    assert trainer.store.steps() == [1]
    trainer.close()


def test_diverged_weights_do_not_push_out_good_ones(tmp_path: Path) -> None:
    """The advice names the last checkpoint from before the spikes."""
    config = recall_run(
        schedule=ScheduleConfig(steps=100, warmup=2),
        checkpoint=CheckpointConfig(every=2, keep=2),
        guard=GuardConfig(patience=7),
    )
    trainer = Trainer(config, tmp_path)

    def diverge(batch: Any, num_targets: int, place: int) -> torch.Tensor:
        return loss(batch, num_targets, place) * (100 if trainer.step >= 30 else 1)

    loss = trainer._loss
    trainer._loss = diverge  # type: ignore[method-assign]
    with pytest.raises(TrainingStopped, match=r"for 7 steps .* last good checkpoint is .*step-00000030;"):
        trainer.run()
    assert trainer.store.steps() == [28, 30, 32, 34, 36]
