"""Accuracy of associative recall by the number of pairs to keep apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sdm.data.batch import IGNORED, Batch
from sdm.data.mqar import MQAR
from sdm.data.published_config import MQARTaskConfig
from sdm.data.recall import recall_batch
from sdm.data.task_config import RecallConfig
from sdm.models import SDMForCausalLM

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
            right += _right(model, batch)
            asked += batch.num_labels
        accuracy[count] = right / asked
    return accuracy


@torch.inference_mode()
def mqar_accuracy(model: SDMForCausalLM, config: MQARTaskConfig, rows: int = 1000) -> dict[int, float]:
    """The same for the test segments of the published task, each of so many rows; by the number of pairs."""
    source, segments = MQAR(config, "test"), config.test_segments
    accuracy = {}
    for segment, (_, pairs) in enumerate(segments):
        right = 0
        for start in range(0, rows, ROWS):
            numbers = range(start, min(start + ROWS, rows))
            right += _right(model, source.batch(segment, numbers))
        accuracy[pairs] = right / (rows * pairs)
    return accuracy


def _right(model: SDMForCausalLM, batch: Batch) -> int:
    """How many labels are the model's likeliest token."""
    batch = batch.to(next(model.parameters()).device)
    hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    wanted = batch.labels != IGNORED
    return int((model.lm_head(hidden[wanted]).argmax(-1) == batch.labels[wanted]).sum())
