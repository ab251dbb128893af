"""The inputs of product-key selection and what must be true of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sdm.ops import backends
from sdm.ops.checks import compute_dtype


@dataclass(eq=False)
class Call(backends.Call):
    """What a backend serves: `run` gives values and slots, [..., k]."""

    scores: Tensor  # [..., 2n]
    k: int

    def __post_init__(self) -> None:
        self.device, self.dtype = self.scores.device, compute_dtype(self.scores)

    def in_full(self) -> tuple[Tensor, int]:
        """Scores in the dtype of the arithmetic, and k."""
        return self.scores if self.scores.dtype == self.dtype else self.scores.to(self.dtype), self.k


def check_scores(scores: Tensor, k: int) -> None:
    """Raise for anything that shapes and dtypes can tell."""
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores must be a torch.Tensor, got {type(scores).__name__}")
    if not scores.is_floating_point():
        raise TypeError(f"scores must be a floating-point tensor, got {scores.dtype}")
    if scores.dim() < 1 or scores.shape[-1] < 2 or scores.shape[-1] % 2:
        raise ValueError(
            f"scores must be [..., 2*sqrt(N)], two halves of equal and positive length, got shape {list(scores.shape)}"
        )
    if isinstance(k, bool) or not isinstance(k, int | torch.SymInt):
        raise TypeError(f"k must be an integer, got {type(k).__name__}")
    num_slots = (scores.shape[-1] // 2) ** 2
    if not 1 <= k <= num_slots:
        raise ValueError(f"k must lie in [1, N] = [1, {num_slots}] for {scores.shape[-1]} scores, got {k}")
