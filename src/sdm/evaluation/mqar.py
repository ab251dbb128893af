"""Accuracy of multi-query associative recall as it was published."""

from __future__ import annotations

from typing import Any

import torch

from sdm.data.mqar import MQAR
from sdm.data.published_config import MQARTaskConfig
from sdm.evaluation.recall import ROWS, count_right
from sdm.models import SDMForCausalLM


@torch.inference_mode()
def mqar_accuracy(model: SDMForCausalLM, config: MQARTaskConfig, rows: int = 1000) -> dict[int, float]:
    """For each test segment of the published task, its number of pairs and the accuracy on so many rows."""
    source, segments = MQAR(config, "test"), config.test_segments
    accuracy = {}
    for segment, (_, pairs) in enumerate(segments):
        right = 0
        for start in range(0, rows, ROWS):
            numbers = range(start, min(start + ROWS, rows))
            right += count_right(model, source.batch(segment, numbers))
        accuracy[pairs] = right / (rows * pairs)
    return accuracy


def measure(model: SDMForCausalLM, data: MQARTaskConfig) -> dict[str, Any]:
    return {"accuracy": {str(pairs): value for pairs, value in mqar_accuracy(model, data).items()}}
