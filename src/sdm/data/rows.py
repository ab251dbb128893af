"""What the synthetic tasks share: a row is a function of its step and its number, and there is no last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sdm.data.batch import IGNORED, Batch, BatchSource
from sdm.data.randomness import fingerprint_of

# The tokens of a row, and a dictionary from positions to what they predict.
RowTokens = tuple[list[int], dict[int, int]]


class DrawnRows(BatchSource):
    """Rows that are drawn one by one. Held-out splits are other rows of the same task."""

    num_steps = None

    def __init__(self, config: Any, split: str = "train") -> None:
        self.config, self.split = config, split

    @property
    def batch_size(self) -> int:
        return self.config.batch_size

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.config, self.split)

    def row(self, step: int, number: int) -> RowTokens:
        raise NotImplementedError

    def batch(self, step: int, rows: Sequence[int]) -> Batch:
        drawn = [self.row(step, number) for number in rows]
        shape = (len(drawn), self.sequence_length)
        input_ids = torch.tensor([tokens for tokens, _ in drawn], dtype=torch.int64)
        targets = [[wanted.get(place, IGNORED) for place in range(len(tokens))] for tokens, wanted in drawn]
        return Batch(input_ids.view(shape), torch.tensor(targets, dtype=torch.int64).view(shape))
