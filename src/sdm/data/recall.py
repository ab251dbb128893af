"""Associative recall: how many pairs can a model keep apart?

A row is K pairs `key value`, then queries, which are keys of the row in random order. The target of a query is the
value of its key; nothing else is predicted. Tokens 0 ... num_keys - 1 are keys, the others values. It is a task of this
project's own: `sdm.data.mqar` is the published one.

Shapes: B rows, K pairs, Q queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from sdm.data.batch import IGNORED, Batch
from sdm.data.errors import DataError
from sdm.data.randomness import fingerprint_of, generator_of
from sdm.data.task_config import RecallConfig


class Growing(Protocol):
    """The settings of a task that gets harder."""

    @property
    def num_pairs(self) -> int: ...
    @property
    def start_pairs(self) -> int: ...
    @property
    def curriculum(self) -> bool: ...


def pairs_at(config: Growing, step: int, total_steps: int) -> int:
    """K at a step of the curriculum."""
    if not config.curriculum:
        return config.num_pairs
    return ramp(config.start_pairs, config.num_pairs, step, total_steps)


def ramp(start: int, end: int, step: int, total_steps: int) -> int:
    """From `start`, kept for a fifth of the steps, exponentially up to `end` at three fifths."""
    progress = step / total_steps
    if progress >= 3 / 5:
        return end
    return round(start * (end / start) ** (max(progress - 1 / 5, 0) / (2 / 5)))


def recall_batch(config: RecallConfig, num_pairs: int, generator: torch.Generator) -> Batch:
    """config.batch_size rows of `num_pairs` pairs."""
    if not 1 <= num_pairs <= config.num_keys:
        raise DataError(f"num_pairs must be between 1 and num_keys = {config.num_keys}, got {num_pairs}")
    batch_size, num_queries = config.batch_size, min(config.num_queries or num_pairs, num_pairs)
    # The order of random numbers is a random order: the first K of it are distinct keys.
    keys_BK = torch.rand(batch_size, config.num_keys, generator=generator).argsort(-1)[:, :num_pairs]
    values_BK = torch.randint(config.num_values, (batch_size, num_pairs), generator=generator) + config.num_keys
    asked_BQ = torch.rand(batch_size, num_pairs, generator=generator).argsort(-1)[:, :num_queries]
    pairs = torch.stack((keys_BK, values_BK), -1).flatten(1)
    input_ids = torch.cat((pairs, keys_BK.gather(1, asked_BQ)), 1)
    targets = torch.cat((torch.full_like(pairs, IGNORED), values_BK.gather(1, asked_BQ)), 1)
    return Batch(input_ids, targets)


class Recall:
    """A `BatchSource`. Held-out splits are other rows, all of them with `num_pairs` pairs."""

    num_steps = None

    def __init__(self, config: RecallConfig, split: str = "train", total_steps: int | None = None) -> None:
        if split == "train" and config.curriculum and (total_steps is None or total_steps < 1):
            raise DataError("a curriculum needs total_steps, the steps of the whole training")
        self.config, self.split = config, split
        self._total_steps = total_steps if split == "train" else None

    @property
    def batch_size(self) -> int:
        return self.config.batch_size

    @property
    def sequence_length(self) -> int:
        pairs = self.config.num_pairs
        return 2 * pairs + min(self.config.num_queries or pairs, pairs)

    @property
    def vocab_size(self) -> int:
        return self.config.num_keys + self.config.num_values

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.config, self.split, self._total_steps)

    def batch(self, step: int, rows: Sequence[int]) -> Batch:
        config = self.config
        pairs = config.num_pairs if self._total_steps is None else pairs_at(config, step, self._total_steps)
        short = max(1, config.num_pairs // pairs) if config.fill else 1  # rows in the place of one
        # All rows are drawn together, whoever wants some: it is cheap, and so no row depends on the number of ranks.
        generator = generator_of(config.seed, "mqar", self.split, step)  # the word is part of the rows' definition
        batch = recall_batch(replace(config, batch_size=config.batch_size * short), pairs, generator)
        chosen = (torch.tensor(rows).unsqueeze(-1) * short + torch.arange(short)).flatten()
        return Batch(batch.input_ids[chosen], batch.targets[chosen])
