"""Associative recall: how many pairs can a model keep apart?

A row is K pairs `key value`, then queries, which are keys of the row in random order. The target of a query is the
value of its key; nothing else is predicted. Tokens 0 ... num_keys - 1 are keys, the others values. It is a task of this
project's own: `sdm.data.mqar` is the published one.

Shapes: B rows, K pairs, Q queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sdm.data.batch import IGNORED, Batch, BatchSource, CurriculumRows
from sdm.data.randomness import generator_of
from sdm.errors import DataError, check_not_negative, check_size


@dataclass(frozen=True)
class RecallConfig:
    """Associative recall: pairs of a key and a value, then keys whose values are asked for."""

    num_pairs: int = 256
    """Pairs of a row; with a curriculum, at its end."""
    start_pairs: int = 8
    """Pairs of a row at the start of the curriculum."""
    curriculum: bool = True
    """Grow the pairs: start_pairs for a fifth of the steps, then exponentially up to num_pairs at three fifths."""
    fill: bool = True
    """While the curriculum's rows are short, put as many in the place of one as have its tokens."""
    num_queries: int | None = None
    """Keys asked for; None: every key once. At most as many as there are pairs."""
    num_keys: int = 512
    """Different keys; those of a row are distinct."""
    num_values: int = 64
    """Different values."""
    batch_size: int = 32
    """Rows of a step, over all ranks and accumulated batches."""
    seed: int = 0
    """Decides every row."""

    def open(self, split: str, total_steps: int | None) -> BatchSource:
        """Return the batches of a split."""
        return Recall(self, split, total_steps)

    def __post_init__(self) -> None:
        check_size(
            num_pairs=self.num_pairs,
            start_pairs=self.start_pairs,
            num_keys=self.num_keys,
            num_values=self.num_values,
            batch_size=self.batch_size,
        )
        check_not_negative(seed=self.seed)
        if self.num_queries is not None:
            check_size(num_queries=self.num_queries)
        if self.num_pairs > self.num_keys:
            raise DataError(f"num_pairs = {self.num_pairs} needs as many distinct keys; num_keys is {self.num_keys}")
        if self.curriculum and self.start_pairs > self.num_pairs:
            raise DataError(f"start_pairs = {self.start_pairs} must not exceed num_pairs = {self.num_pairs}")


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


class Recall(CurriculumRows):
    """A `BatchSource`."""

    config: RecallConfig

    @property
    def sequence_length(self) -> int:
        """Tokens of a row at the end of the curriculum."""
        pairs = self.config.num_pairs
        return 2 * pairs + min(self.config.num_queries or pairs, pairs)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""
        return self.config.num_keys + self.config.num_values

    def pairs_at(self, step: int) -> int:
        """K at a step of the curriculum."""
        return self.grown(self.config.start_pairs, self.config.num_pairs, step)

    def draw(self, step: int) -> tuple[Batch, int]:
        """Draw all rows of a step.

        Returns:
            The rows, and how many short ones take the place of a row of full length.
        """
        config, pairs = self.config, self.pairs_at(step)
        short = max(1, config.num_pairs // pairs) if config.fill else 1
        generator = generator_of(config.seed, "mqar", self.split, step)  # the word is part of the rows' definition
        return recall_batch(replace(config, batch_size=config.batch_size * short), pairs, generator), short
