"""Stop before a run is wasted: losses and gradients that are not finite, and losses that explode."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from sdm.training.config import GuardConfig
from sdm.training.errors import TrainingStopped

WINDOW = 100
SMALLEST = 0.5  # nats above the mean, below which nothing is a spike
FEWEST = 20  # losses before spikes are told from ordinary ones


class Guard:
    """Looks at every step before the optimizer uses it."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.spikes = 0

    def check(
        self, step: int, loss: float, gradient_norm: float, model: torch.nn.Module, advice: Callable[[], str]
    ) -> None:
        """Raise `TrainingStopped` with a diagnosis. The weights are still those before the step."""
        if not math.isfinite(loss) or not math.isfinite(gradient_norm):
            raise TrainingStopped(
                f"step {step}: the loss is {loss} and the norm of the gradient {gradient_norm}. {_culprits(model)} "
                f"{advice()}"
            )
        if self.config.spike and self._is_spike(loss):
            self.spikes += 1
            if self.spikes >= self.config.patience:
                raise TrainingStopped(
                    f"step {step}: the loss has been far above its recent mean of "
                    f"{statistics.fmean(self.recent):.3f} for {self.spikes} steps and is {loss:.3f} now, with a "
                    f"gradient of norm {gradient_norm:.3g}. {advice()}"
                )
            return  # a spike must not become part of what is normal
        self.spikes = 0
        self.recent.append(loss)

    def _is_spike(self, loss: float) -> bool:
        if len(self.recent) < FEWEST:
            return False
        mean = statistics.fmean(self.recent)
        spread = statistics.median(abs(value - mean) for value in self.recent)
        return loss > mean + max(self.config.spike * spread, abs(mean) / 2, SMALLEST)

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self.recent), "spikes": self.spikes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent = deque(state["recent"], maxlen=WINDOW)
        self.spikes = state["spikes"]


def _culprits(model: torch.nn.Module) -> str:
    """Which weights, then which gradients, are not finite."""
    weights = [name for name, x in model.named_parameters() if not bool(x.isfinite().all())]
    if weights:
        return f"Weights that are not finite: {_few(weights)}."
    gradients = [
        name for name, x in model.named_parameters() if x.grad is not None and not bool(x.grad.isfinite().all())
    ]
    if gradients:
        return f"The weights are finite; gradients that are not: {_few(gradients)}."
    return "All weights and gradients are finite: their sum of squares overflowed."


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
