"""Rows of a task that grows while a model is trained: a curriculum, with short rows standing for one long one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sdm.data.batch import Batch, BatchSource
from sdm.data.errors import DataError
from sdm.data.randomness import fingerprint_of


def ramp(start: int, end: int, step: int, total_steps: int) -> int:
    """From `start`, kept for a fifth of the steps, exponentially up to `end` at three fifths."""
    progress = step / total_steps
    if progress >= 3 / 5:
        return end
    return round(start * (end / start) ** (max(progress - 1 / 5, 0) / (2 / 5)))


class Growing(Protocol):
    """The configuration of a task that may grow."""

    @property
    def batch_size(self) -> int:
        """Rows of a step over all ranks."""

    @property
    def curriculum(self) -> bool:
        """Whether the rows grow."""


class CurriculumRows(BatchSource):
    """Rows that are drawn together, whoever wants some: it is cheap, and so no row depends on the number of ranks.
    Held-out splits are other rows, all of them of the full size."""

    num_steps = None

    def __init__(self, config: Growing, split: str = "train", total_steps: int | None = None) -> None:
        if split == "train" and config.curriculum and (total_steps is None or total_steps < 1):
            raise DataError("a curriculum needs total_steps, the steps of the whole training")
        self.config, self.split = config, split
        self._total_steps = total_steps if split == "train" and config.curriculum else None

    @property
    def batch_size(self) -> int:
        """Rows of a step over all ranks."""
        return self.config.batch_size

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that the batches depend on."""
        return fingerprint_of(self.config, self.split, self._total_steps)

    def grown(self, start: int, end: int, step: int) -> int:
        """A size at a step: `end`, unless the curriculum is still on its way there."""
        if self._total_steps is None or not self.config.curriculum:
            return end
        return ramp(start, end, step, self._total_steps)

    def draw(self, step: int) -> tuple[Batch, int]:
        """All rows of a step, and how many of them stand in the place of one."""
        raise NotImplementedError

    def batch(self, step: int, rows: Sequence[int]) -> Batch:
        """Return the chosen rows of a step, each with the short rows that take its place."""
        batch, short = self.draw(step)
        chosen = (torch.tensor(rows).unsqueeze(-1) * short + torch.arange(short)).flatten()
        return Batch(batch.input_ids[chosen], batch.targets[chosen])
