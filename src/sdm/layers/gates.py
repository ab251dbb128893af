"""The decay gate that the recurrent layers share.

It multiplies over thousands of tokens, so that it is computed in float32 whatever the dtype of the model.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Float32Linear(nn.Linear):
    """A projection in float32 (float64 if the input is), whatever the dtype of its weight; autocast does not lower it.

    It is a module of its own, and not a function of the weight, so that adapters such as LoRA find it and count.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Project x in float32, whatever its dtype."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        x, weight, bias = x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        if not torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight, bias)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, bias)


def decay_gate(projected: Tensor, bias: Tensor, log_rate: Tensor) -> tuple[Tensor, Tensor]:
    """The time step softplus(W x + b) of a projection W x and the log decay -A times it, each [...,H]."""
    step = F.softplus(projected + bias.to(projected.dtype))
    return step, -log_rate.to(step.dtype).exp() * step


LARGEST_DECAY_RATE = 16.0


def reset_decay(
    log_rate: nn.Parameter, bias: nn.Parameter, lowest_rate: float = 0.0, largest_rate: float = LARGEST_DECAY_RATE
) -> None:
    """Draw A uniformly, kept as its logarithm; b is the inverse softplus of a step log-uniform in [0.001, 0.1]."""
    with torch.no_grad():
        log_rate.uniform_(lowest_rate, largest_rate).clamp_(min=1e-4).log_()
        step = bias.uniform_(math.log(1e-3), math.log(1e-1)).exp()
        bias.copy_(step + torch.log(-torch.expm1(-step)))
