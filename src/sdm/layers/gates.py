"""The decay gate that the recurrent layers share.

It multiplies over thousands of tokens, so that it is computed in float32 whatever the dtype of the model.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A projection in float32, or float64 if the input is; autocast does not lower it."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if not torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, weight, bias)


def decay_gate(x: Tensor, weight: Tensor, bias: Tensor, log_rate: Tensor) -> tuple[Tensor, Tensor]:
    """The time step softplus(W x + b) and the log decay -A times it, each [...,H]."""
    step = F.softplus(float32_linear(x, weight, bias))
    return step, -log_rate.to(step.dtype).exp() * step


def reset_decay(log_rate: nn.Parameter, bias: nn.Parameter, lowest_rate: float = 0.0) -> None:
    """A uniform up to 16, kept as its logarithm; b the inverse softplus of a step log-uniform in [0.001, 0.1]."""
    with torch.no_grad():
        log_rate.uniform_(lowest_rate, 16).clamp_(min=1e-4).log_()
        step = bias.uniform_(math.log(1e-3), math.log(1e-1)).exp()
        bias.copy_(step + torch.log(-torch.expm1(-step)))
