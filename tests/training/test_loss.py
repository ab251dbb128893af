"""Accumulation, checkpointing and segments change what is kept, not what is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_close
from sdm.data import Batch
from sdm.models import SDMForCausalLM
from sdm.models.likelihood import States, nll
from sdm.run.config import ComputeConfig, MonitorConfig
from sdm.training import Trainer
from tiny_models import VOCABULARY, tiny_config, tiny_model
from training.runs import MODEL, assert_same, recall_run, text_run, train


def random_batch(rows: int, time: int, **fields: Any) -> Batch:
    ids = torch.randint(0, VOCABULARY, (rows, time + 1))
    return Batch(ids[:, :-1], ids[:, 1:].contiguous(), **fields)


def batch_loss(model: SDMForCausalLM, batch: Batch, num_targets: int) -> Tensor:
    return nll(model, batch.input_ids, batch.targets)[0] / num_targets


def carried_loss(
    model: SDMForCausalLM,
    batch: Batch,
    num_targets: int,
    states: States | None,
    segment_length: int | None,
    begins: Tensor | None = None,
) -> tuple[Tensor, States]:
    total, after = nll(model, batch.input_ids, batch.targets, None, states, True, segment_length, begins=begins)
    assert after is not None
    return total / num_targets, after


def gradients(model: SDMForCausalLM, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


@pytest.mark.parametrize("stack", ["sdm", "gdn", "all_recurrent"])
@pytest.mark.parametrize("segment_length", [None, 4, 16])
def test_segments_are_the_whole(stack: str, segment_length: int | None) -> None:
    model = tiny_model(stack).train().double()
    batch = random_batch(2, 13)
    whole = batch_loss(model, batch, 26)
    loss, states = carried_loss(model, batch, 26, None, segment_length)
    assert len(states) == 4
    assert_close([loss, *gradients(model, loss)], [whole, *gradients(model, whole)], 1e-6)


def test_shifted_keys_in_segments() -> None:
    config = tiny_config("all_recurrent", layer_types=["token_shift", "sdm", "gdn", "token_shift"], shift_keys=True)
    model = SDMForCausalLM(config).train().double()
    batch = random_batch(2, 13)
    whole, (loss, _) = batch_loss(model, batch, 26), carried_loss(model, batch, 26, None, 5)
    assert_close([loss, *gradients(model, loss)], [whole, *gradients(model, whole)], 1e-6)


@pytest.mark.parametrize("segment_length", [None, 3])
@pytest.mark.parametrize("stack", ["sdm", "all_recurrent"])
def test_streams_continue_where_they_were(stack: str, segment_length: int | None) -> None:
    """Two steps are one long row, where a row goes on; where it starts anew, they are two rows."""
    model = tiny_model(stack).train().double()
    first, second = random_batch(2, 6), random_batch(2, 7)
    _, states = carried_loss(model, first, 1, None, None)
    states = [state.map(Tensor.detach) for state in states]
    loss, _ = carried_loss(model, second, 1, states, segment_length, torch.tensor([False, True]))

    long = Batch(
        torch.cat((first.input_ids[:1], second.input_ids[:1]), 1),
        torch.cat((torch.full((1, 6), -100), second.targets[:1]), 1),
    )
    alone = Batch(second.input_ids[1:], second.targets[1:])
    with torch.no_grad():
        expected = batch_loss(model, long, 1) + batch_loss(model, alone, 1)
    assert_close([loss], [expected], 1e-6)
    # The row that begins gives M0 a gradient; the row that goes on is cut off from the step before.
    table = [x for name, x in model.named_parameters() if name.endswith("initial_state")]
    (gradient,) = torch.autograd.grad(loss, table[:1])
    (expected_gradient,) = torch.autograd.grad(batch_loss(model, alone, 1), table[:1])
    assert_close([gradient], [expected_gradient], 1e-6)


def test_few_targets_need_few_logits() -> None:
    model = tiny_model().train().double()
    batch = random_batch(2, 9)
    targets = torch.full_like(batch.targets, -100)
    targets[:, 7] = batch.targets[:, 7]
    loss = batch_loss(model, Batch(batch.input_ids, targets), 2)
    logits = model(batch.input_ids).logits[:, 7]
    assert_close([loss], [torch.nn.functional.cross_entropy(logits, targets[:, 7])], 1e-6)


@pytest.mark.parametrize(
    ("layout", "compute"),
    [
        ("packed", {"accumulation": 2}),
        ("rows", {"accumulation": 4}),
        ("rows", {"checkpointing": "block"}),
        ("rows", {"checkpointing": "segment", "segment_length": 8}),
        ("stream", {"checkpointing": "segment", "segment_length": 8}),
        ("rows", {"precision": "bfloat16"}),
    ],
)
def test_ways_to_compute_a_step(tmp_path: Path, layout: str, compute: dict[str, Any]) -> None:
    """What a run has learned is the same: the difference is small beside the difference to where both began."""
    trainer = Trainer(text_run(tmp_path, layout), tmp_path / "untrained")
    start = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    trainer.close()
    plain = train(text_run(tmp_path, layout), tmp_path / "plain")
    other = train(text_run(tmp_path, layout, compute=ComputeConfig(threads=1, **compute)), tmp_path / "other")
    learned, difference = (
        torch.cat([(one[name] - start[name]).flatten() for name in start]).norm()
        for one in (plain, {name: start[name] + other[name] - x for name, x in plain.items()})
    )
    assert difference < (0.1 if "precision" in compute else 1e-2) * learned, f"{difference / learned:.2g}"
    if "precision" in compute:
        assert difference > 1e-3 * learned, "it was computed in another precision"


def test_nobody_looks_with_consequences(tmp_path: Path) -> None:
    """Validation, statistics and checkpointing leave the running statistics of batch normalisation as they are."""
    plain = text_run(tmp_path, "rows")
    plain = replace(plain, model=replace(plain.model, query_batch_norm=True))
    quiet = MonitorConfig(display="none", memory_every=0, validation_batches=0)
    expected = train(replace(plain, monitor=quiet), tmp_path / "quiet")
    assert expected["model.layers.1.mixer.query_batch_norm.running_mean"].abs().max() > 0
    assert_same(train(plain, tmp_path / "watched"), expected)
    block = replace(plain, compute=replace(plain.compute, checkpointing="block"))
    assert_same(train(block, tmp_path / "block"), expected)


def test_validation_uses_running_statistics(tmp_path: Path) -> None:
    config = recall_run(model=replace(MODEL, query_batch_norm=True))
    trainer = Trainer(config, tmp_path)
    trainer.train_step()
    modes = []
    trainer.model.model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    assert trainer.validate() == trainer.validate()
    assert modes == [False, False]
    assert all(module.training for module in trainer.model.modules())
    trainer.close()


def test_same_seed_same_run(tmp_path: Path) -> None:
    assert_same(train(recall_run(), tmp_path / "a"), train(recall_run(), tmp_path / "b"))


def test_compiled(tmp_path: Path) -> None:
    """The option reaches the model; what a compiler makes of it is torch's business."""
    trainer = Trainer(recall_run(compute=ComputeConfig(threads=1, compile=True)), tmp_path)
    assert trainer.model.model._compiled_call_impl is not None
    trainer.close()
