"""Along which dimension ranks that share weights are dealt a parameter."""

from __future__ import annotations

import math

import torch


def share_dim(shape: torch.Size, ranks: int) -> int:
    """The first, unless that is too short to give every rank something: the initial state of a memory with one head is
    cut into slots."""
    longest = max(range(len(shape)), key=lambda dim: shape[dim])
    return longest if shape[0] < ranks and shape[longest] % ranks == 0 else 0


def share_size(shape: torch.Size, ranks: int) -> int:
    """Elements of a rank's share as it is sent: all have the same size, and the last ones may be filled up."""
    dim = share_dim(shape, ranks)
    return math.ceil(shape[dim] / ranks) * shape.numel() // max(shape[dim], 1)
