"""Accuracy of associative recall by the number of pairs to keep apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sdm.data.batch import IGNORED
from sdm.data.config import MQARConfig
from sdm.data.mqar import mqar_batch
from sdm.models import SDMForCausalLM

ROWS = 4  # at a time


@torch.inference_mode()
def recall_accuracy(
    model: SDMForCausalLM, config: MQARConfig, pairs: Sequence[int], queries: int = 8192, seed: int = 1
) -> dict[int, float]:
    """For each K, the share of at least `queries` queried values that are the model's likeliest token."""
    device = next(model.parameters()).device
    accuracy = {}
    for count in pairs:
        generator = torch.Generator().manual_seed(1_000_003 * seed + count)
        right, asked = 0, 0
        while asked < queries:
            batch = mqar_batch(replace(config, batch_size=ROWS), count, generator).to(device)
            hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
            wanted = batch.labels != IGNORED
            right += int((model.lm_head(hidden[wanted]).argmax(-1) == batch.labels[wanted]).sum())
            asked += batch.num_labels
        accuracy[count] = right / asked
    return accuracy
