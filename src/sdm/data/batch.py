"""What a model is trained on at one step, and who makes it.

Shapes: B rows, T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sdm.constants import IGNORED
from sdm.data.errors import DataError


@dataclass(frozen=True)
class Batch:
    """Tokens and what to predict at each of them.

    targets[b,t] is the token to predict after input_ids[b,t], also at the end of a row, where the next token is known
    though the row does not hold it. They are not the `labels` of transformers, which a model shifts:
    `sdm.models.likelihood.nll` takes them as they are, and so does `model(input_ids, shift_labels=batch.targets)`.
    """

    input_ids: Tensor
    """[B,T] int64."""
    targets: Tensor
    """[B,T] int64, -100 where nothing is to be predicted."""
    cu_seqlens: Tensor | None = None
    """[documents + 1] int32 offsets of the documents packed into one row (then B = 1)."""
    reset: Tensor | None = None
    """[B] bool, for streams: True where a row starts anew; elsewhere it continues the same row of the step before."""

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2 or self.targets.shape != self.input_ids.shape:
            shapes = f"{list(self.input_ids.shape)} and {list(self.targets.shape)}"
            raise DataError(f"input_ids and targets must both be [B,T], got {shapes}")
        if self.cu_seqlens is not None and len(self.input_ids) != 1:
            raise DataError(f"cu_seqlens packs documents into one row, got {len(self.input_ids)} rows")
        if self.reset is not None and self.reset.shape != self.input_ids.shape[:1]:
            raise DataError(f"reset must be [B] = [{len(self.input_ids)}], got {list(self.reset.shape)}")

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.input_ids.numel()

    @property
    def num_targets(self) -> int:
        """How many positions have something to predict: what a summed loss is divided by."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return a copy of the batch on a device."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, non_blocking=non_blocking)

        input_ids = self.input_ids.to(device, non_blocking=non_blocking)
        targets = self.targets.to(device, non_blocking=non_blocking)
        return Batch(input_ids, targets, move(self.cu_seqlens), move(self.reset))


class BatchSource(Protocol):
    """Batches as a function of the step: nothing is remembered between two calls, so any step can come first."""

    @property
    def batch_size(self) -> int:
        """Rows of one step over all ranks."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a row, the longest one if it varies."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""

    @property
    def num_steps(self) -> int | None:
        """Steps after which everything has been seen once and the source ends; None if it goes on for ever."""

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes the batches."""

    def batch(self, step: int, rows: Sequence[int]) -> Batch:
        """The chosen rows of the global batch of this step."""
