"""Accuracy of associative recall by the number of pairs to keep apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sdm.data.batch import IGNORED, Batch
from sdm.data.recall import recall_batch
from sdm.data.task_config import RecallConfig
from sdm.models import SDMForCausalLM

PAIRS = (16, 32, 64, 128, 256, 512)
ROWS = 4  # at a time


@torch.inference_mode()
def recall_accuracy(
    model: SDMForCausalLM, config: RecallConfig, pairs: Sequence[int], queries: int = 8192, seed: int = 1
) -> dict[int, float]:
    """For each K, the share of at least `queries` queried values that are the model's likeliest token."""
    accuracy = {}
    for count in pairs:
        generator = torch.Generator().manual_seed(1_000_003 * seed + count)
        right, asked = 0, 0
        while asked < queries:
            batch = recall_batch(replace(config, batch_size=ROWS), count, generator)
            right += count_right(model, batch)
            asked += batch.num_targets
        accuracy[count] = right / asked
    return accuracy


def measure(model: SDMForCausalLM, data: RecallConfig) -> dict[str, Any]:
    """At the numbers of pairs that the data has keys for."""
    accuracy = recall_accuracy(model, data, [pairs for pairs in PAIRS if pairs <= data.num_keys])
    return {"accuracy": {str(pairs): value for pairs, value in accuracy.items()}}


def count_right(model: SDMForCausalLM, batch: Batch) -> int:
    """How many targets are the model's likeliest token."""
    batch = batch.to(next(model.parameters()).device)
    hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    wanted = batch.targets != IGNORED
    return int((model.lm_head(hidden[wanted]).argmax(-1) == batch.targets[wanted]).sum())
