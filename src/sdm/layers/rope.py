"""Rotary position embedding: pairs of channels turned by an angle that grows with the position."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Rope:
    """How fast each pair of channels turns.

    Plain numbers: a buffer would be lost by loaders that skip what is not in a file, and rounded by `model.half()`.
    """

    theta: float = 500_000.0  # channel pair i turns by theta^(-2i / head_dim) radians per token
    frequencies: tuple[float, ...] | None = None  # radians per token of each pair, instead of those of theta
    scale: float = 1.0  # of the rotated queries and keys

    def __post_init__(self) -> None:
        if not 0 < self.theta < math.inf:
            raise ValueError(f"rope_theta must be positive, got {self.theta}")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"the scale of a Rope must be positive, got {self.scale}")

    def check(self, head_dim: int) -> None:
        """Raise unless heads of this size can have these frequencies."""
        if head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs of channels: hidden_size / num_heads must be even, got {head_dim}"
            )
        if self.frequencies is not None and len(self.frequencies) != head_dim // 2:
            raise ValueError(
                f"heads of {head_dim} channels need {head_dim // 2} frequencies, got {len(self.frequencies)}"
            )


def rotation(position: Tensor, head_dim: int, rope: Rope) -> tuple[Tensor, Tensor]:
    """Scaled cosine and sine of the angles at the positions [...], each [..., 1, head_dim / 2]; the heads share."""
    # Whole turns are dropped in float64: at position 10^6 the float32 angle itself is off by 0.03.
    dtype = torch.float32 if position.device.type == "mps" else torch.float64
    turns = _turns(head_dim, rope, dtype, position.device)
    angle = ((position[..., None, None] * turns).frac() * (2 * math.pi)).to(torch.float32)
    cosine, sine = angle.cos(), angle.sin()
    return (cosine, sine) if rope.scale == 1.0 else (cosine * rope.scale, sine * rope.scale)


def _turns(head_dim: int, rope: Rope, dtype: torch.dtype, device: torch.device) -> Tensor:
    """How much of a turn each pair of channels takes per token, [head_dim / 2]."""
    if rope.frequencies is not None:
        return torch.tensor(rope.frequencies, dtype=dtype, device=device) / (2 * math.pi)
    slowest = math.log10(rope.theta) * (2 / head_dim - 1)
    full_turn = math.log10(2 * math.pi)
    return torch.logspace(-full_turn, slowest - full_turn, head_dim // 2, base=10.0, dtype=dtype, device=device)


@functools.lru_cache(maxsize=16)
def turns_per_position(head_dim: int, rope: Rope) -> Tensor:
    """Return how much of a turn each pair of channels takes per token, [head_dim / 2] in float64 on the CPU."""
    with torch.inference_mode(False):
        return _turns(head_dim, rope, torch.float64, torch.device("cpu"))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [..., heads, head_dim], whose channels i and i + head_dim / 2 make a pair."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
