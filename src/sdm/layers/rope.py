"""Rotary position embedding: pairs of channels turned by an angle that grows with the position."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotation(position: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles at the positions [...], each [..., 1, head_dim / 2], for the heads to share."""
    # Whole turns are dropped in float64: at position 10^6 the float32 angle itself is off by 0.03.
    dtype = torch.float32 if position.device.type == "mps" else torch.float64
    # Channel pair i makes theta^(-2i / head_dim) / 2 pi turns per token.
    slowest = math.log10(theta) * (2 / head_dim - 1)
    full_turn = math.log10(2 * math.pi)
    frequency = torch.logspace(
        -full_turn, slowest - full_turn, head_dim // 2, base=10.0, dtype=dtype, device=position.device
    )
    angle = ((position[..., None, None] * frequency).frac() * (2 * math.pi)).to(torch.float32)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [..., heads, head_dim], whose channels i and i + head_dim / 2 make a pair."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
