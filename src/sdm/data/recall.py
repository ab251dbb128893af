"""Associative recall: how many pairs can a model keep apart?

A row is K pairs `key value`, then queries, which are keys of the row in random order. The target of a query is the
value of its key; nothing else is predicted. Tokens 0 ... num_keys - 1 are keys, the others values. It is a task of this
project's own: `sdm.data.mqar` is the published one.

Shapes: B rows, K pairs, Q queries.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sdm.data.batch import IGNORED, Batch
from sdm.data.errors import DataError
from sdm.data.growing import GrowingRows
from sdm.data.randomness import generator_of
from sdm.data.task_config import RecallConfig


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


class Recall(GrowingRows):
    """A `BatchSource`."""

    config: RecallConfig

    @property
    def sequence_length(self) -> int:
        pairs = self.config.num_pairs
        return 2 * pairs + min(self.config.num_queries or pairs, pairs)

    @property
    def vocab_size(self) -> int:
        return self.config.num_keys + self.config.num_values

    def pairs_at(self, step: int) -> int:
        """K at a step of the curriculum."""
        return self.grown(self.config.start_pairs, self.config.num_pairs, step)

    def draw(self, step: int) -> tuple[Batch, int]:
        config, pairs = self.config, self.pairs_at(step)
        short = max(1, config.num_pairs // pairs) if config.fill else 1
        generator = generator_of(config.seed, "mqar", self.split, step)  # the word is part of the rows' definition
        return recall_batch(replace(config, batch_size=config.batch_size * short), pairs, generator), short
