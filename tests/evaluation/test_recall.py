"""Recall is measured on a model that recalls, and on the same one with a part taken out."""

from __future__ import annotations

import pytest
import torch

from sdm.data import MQARTaskConfig, RecallConfig
from sdm.evaluation.mqar import mqar_accuracy
from sdm.evaluation.recall import recall_accuracy
from sdm.models import SDMForCausalLM
from tiny_models import recalling_model

RECALL = RecallConfig(num_pairs=16, num_keys=40, num_values=20)
MQAR = MQARTaskConfig(
    vocab_size=64, train_segments=((16, 2, 8),), test_segments=((32, 4), (96, 24)), batch_size=8, random_filler=False
)


def accuracy(model: SDMForCausalLM) -> list[float]:
    """Of few and of many pairs, in both tasks."""
    own, published = recall_accuracy(model, RECALL, (2, 40), queries=400), mqar_accuracy(model, MQAR, rows=10)
    assert own.keys() == {2, 40}
    assert published.keys() == {4, 24}
    return [*own.values(), *published.values()]


@pytest.fixture
def model() -> SDMForCausalLM:
    return recalling_model(64)


@torch.no_grad()
def test_a_model_that_recalls(model: SDMForCausalLM) -> None:
    assert accuracy(model) == [1.0] * 4
    model.lm_head.weight.zero_()
    assert accuracy(model)[2:] == [0.0, 0.0], "token 0 is no value"


@torch.no_grad()
def test_a_memory_that_nothing_is_written_to(model: SDMForCausalLM) -> None:
    model.model.layers[0].mixer.layer.beta_proj.weight.neg_()
    assert accuracy(model) == [0.0] * 4


@torch.no_grad()
def test_as_many_pairs_as_slots_are_kept_apart(model: SDMForCausalLM) -> None:
    """With eight addresses, two pairs sometimes collide (their values are written to as well) and forty always do."""
    memory = model.model.layers[0].mixer.layer
    for proj in (memory.query_proj, memory.key_proj):
        proj.weight[:8] = 0
    few, many, _, _ = accuracy(model)
    assert 0.6 < few < 0.9
    assert many < 0.3
