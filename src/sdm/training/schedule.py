"""Warmup-Stable-Decay: what share of the learning rate a step gets."""

from __future__ import annotations

import math

from sdm.run.config import ScheduleConfig


def learning_rate_factor(schedule: ScheduleConfig, step: int) -> float:
    """The factor of a step, counted from 0. Neither the first step nor the last is wasted on a rate of zero."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    left = schedule.steps - 1 - step
    if left >= schedule.decay_steps:
        return 1.0
    way = 1 - (max(left, 0) + 1) / schedule.decay_steps
    if schedule.shape == "linear":
        height = 1 - way
    elif schedule.shape == "cosine":
        height = (1 + math.cos(math.pi * way)) / 2
    else:
        height = 1 - math.sqrt(way)
    return schedule.final + (1 - schedule.final) * height
