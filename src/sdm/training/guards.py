"""Guards that stop a run: losses and gradients that are not finite, and losses that explode."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from sdm.run.config import GuardConfig
from sdm.signals import TrainingStopped
from sdm.training.parallel import local

WINDOW = 100
SMALLEST = 0.5  # nats above the mean, below which nothing is a spike
_NOT_FINITE = re.compile(r"\b(nan|inf)\b", re.IGNORECASE)
FEWEST = 20  # losses before spikes are told from ordinary ones


class Guard(Stateful):
    """Checks every step before the optimizer uses its gradient."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.spikes = 0

    def check(
        self, step: int, loss: float, gradient_norm: float, model: torch.nn.Module, advice: Callable[[], str]
    ) -> None:
        """Raise `TrainingStopped` with a diagnosis if a step must not be taken. The weights are not changed yet."""
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

    def explain(
        self,
        step: int,
        error: Exception,
        model: torch.nn.Module,
        again: Callable[[], object] | None,
        advice: Callable[[], str],
    ) -> None:
        """Raise `TrainingStopped` if an op has failed because of a number that is not finite.

        Args:
            step: the step that failed.
            error: what the op raised.
            model: is searched for weights and outputs that are not finite.
            again: repeats the computation, to find the module where it began; None if it cannot be repeated.
            advice: what to do, for the message.
        """
        reason = _weights_not_finite(model) or ("" if again is None else _first_not_finite(model, again))
        if not reason and _NOT_FINITE.search(str(error)):
            reason = "All weights and the outputs of all modules are finite."
        if reason:
            raise TrainingStopped(f"step {step}: {error}. {reason} {advice()}") from error

    def check_weights(self, step: int, model: torch.nn.Module, advice: Callable[[], str]) -> None:
        """Raise `TrainingStopped` if any weight is not finite: such weights are not saved."""
        if reason := _weights_not_finite(model):
            raise TrainingStopped(f"step {step} is not saved. {reason} {advice()}")

    def _is_spike(self, loss: float) -> bool:
        if len(self.recent) < FEWEST:
            return False
        mean = statistics.fmean(self.recent)
        spread = statistics.median(abs(value - mean) for value in self.recent)
        return loss > mean + max(self.config.spike * spread, abs(mean) / 2, SMALLEST)

    def state_dict(self) -> dict[str, Any]:
        """Return the recent losses and the number of spikes in a row."""
        return {"recent": list(self.recent), "spikes": self.spikes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the recent losses of a checkpoint."""
        self.recent = deque(state_dict["recent"], maxlen=WINDOW)
        self.spikes = state_dict["spikes"]


def _culprits(model: torch.nn.Module) -> str:
    """Which weights, then which gradients, are not finite."""
    if reason := _weights_not_finite(model):
        return reason
    gradients = [
        name for name, x in model.named_parameters() if x.grad is not None and not bool(local(x.grad).isfinite().all())
    ]
    if gradients:
        return f"The weights are finite; gradients that are not: {_few(gradients)}."
    return "All weights and gradients are finite: their sum of squares overflowed."


def _weights_not_finite(model: torch.nn.Module) -> str:
    names = [name for name, x in model.named_parameters() if not bool(local(x).isfinite().all())]
    return f"Weights that are not finite: {_few(names)}." if names else ""


@torch.no_grad()
def _first_not_finite(model: torch.nn.Module, again: Callable[[], object]) -> str:
    reasons: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: object, output: object) -> None:
            tensors = [x for x in (output if isinstance(output, tuple) else (output,)) if isinstance(x, torch.Tensor)]
            if not reasons and not all(bool(x.isfinite().all()) for x in tensors):
                reasons.append(f"The weights are finite; the output of {name} is not.")

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        again()
    except Exception:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return "".join(reasons)


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
