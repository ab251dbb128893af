"""Associative recall with keys that are bound again: does a model forget what no longer holds?

A row binds K keys to values, each of them several times and each time to another value, in random order. Then every key
is asked for once, and the target is the value that it was bound to last. A memory that adds up what it is told answers
with a mixture; one that replaces, as the delta rule does, with the last. Tokens 0 ... num_keys - 1 are keys, the others
values.

Shapes: B rows, K keys, J bindings of a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sdm.data.batch import IGNORED, Batch, BatchSource, CurriculumRows
from sdm.data.randomness import generator_of
from sdm.errors import DataError, check_not_negative, check_size


@dataclass(frozen=True)
class RebindingConfig:
    """Associative recall in which keys are bound several times: the last value of a key counts."""

    num_pairs: int = 64
    """Different keys of a row; with a curriculum, at its end."""
    num_bindings: int = 4
    """How often each key is bound, each time to another value."""
    start_pairs: int = 8
    """Keys of a row at the start of the curriculum, where each is bound once."""
    curriculum: bool = True
    """Grow the keys and the bindings: the start for a fifth of the steps, then exponentially up to num_pairs and
    num_bindings at three fifths. While rows are short, as many are put in the place of one as have its tokens."""
    num_keys: int = 512
    """Different keys; those of a row are distinct."""
    num_values: int = 64
    """Different values; those of a key are distinct."""
    batch_size: int = 32
    """Rows of a step, over all ranks and accumulated batches."""
    seed: int = 0
    """Decides every row."""

    def open(self, split: str, total_steps: int | None) -> BatchSource:
        """Return the batches of a split."""
        return Rebinding(self, split, total_steps)

    def __post_init__(self) -> None:
        check_size(
            num_pairs=self.num_pairs,
            num_bindings=self.num_bindings,
            start_pairs=self.start_pairs,
            num_keys=self.num_keys,
            num_values=self.num_values,
            batch_size=self.batch_size,
        )
        check_not_negative(seed=self.seed)
        if self.num_pairs > self.num_keys:
            raise DataError(f"num_pairs = {self.num_pairs} needs as many distinct keys; num_keys is {self.num_keys}")
        if self.num_bindings > self.num_values:
            raise DataError(
                f"num_bindings = {self.num_bindings} needs as many distinct values; num_values is {self.num_values}"
            )
        if self.curriculum and self.start_pairs > self.num_pairs:
            raise DataError(f"start_pairs = {self.start_pairs} must not exceed num_pairs = {self.num_pairs}")


@dataclass(frozen=True)
class Rebound:
    """Rows, and what their keys were bound to before."""

    batch: Batch
    former_BKJ: Tensor
    """The values of each queried key but the last, J - 1 of them, in the order of the queries."""


def rebinding_rows(
    config: RebindingConfig, num_pairs: int, num_bindings: int, rows: int, generator: torch.Generator
) -> Rebound:
    """`rows` rows of `num_pairs` keys, each bound `num_bindings` times."""
    if not 1 <= num_pairs <= config.num_keys:
        raise DataError(f"num_pairs must be between 1 and num_keys = {config.num_keys}, got {num_pairs}")
    if not 1 <= num_bindings <= config.num_values:
        raise DataError(f"num_bindings must be between 1 and num_values = {config.num_values}, got {num_bindings}")
    times, total = num_bindings, num_pairs * num_bindings
    # The order of random numbers is a random order: the first of it are distinct.
    keys_BK = torch.rand(rows, config.num_keys, generator=generator).argsort(-1)[:, :num_pairs]
    drawn = torch.rand(rows, num_pairs, config.num_values, generator=generator).argsort(-1)[..., :times]
    values_BKJ = drawn + config.num_keys
    # Which key each binding is of: a random order of J times every key. The j-th of a key takes its j-th value.
    owner = torch.rand(rows, total, generator=generator).argsort(-1) % num_pairs
    nth = _occurrence(owner, num_pairs)
    bound_keys = keys_BK.gather(1, owner)
    bound_values = values_BKJ.flatten(1).gather(1, owner * times + nth)
    asked_BK = torch.rand(rows, num_pairs, generator=generator).argsort(-1)

    bindings = torch.stack((bound_keys, bound_values), -1).flatten(1)
    latest_BK = values_BKJ[..., -1].gather(1, asked_BK)
    former_BKJ = values_BKJ[..., :-1].gather(1, asked_BK.unsqueeze(-1).expand(-1, -1, times - 1))
    input_ids = torch.cat((bindings, keys_BK.gather(1, asked_BK)), 1)
    targets = torch.cat((torch.full_like(bindings, IGNORED), latest_BK), 1)
    return Rebound(Batch(input_ids, targets), former_BKJ)


def _occurrence(owner: Tensor, num_pairs: int) -> Tensor:
    """How often the key of each binding was bound before it, within its row."""
    seen = torch.nn.functional.one_hot(owner, num_pairs).cumsum(1)
    return seen.gather(2, owner.unsqueeze(-1)).squeeze(-1) - 1


class Rebinding(CurriculumRows):
    """A `BatchSource`."""

    config: RebindingConfig

    @property
    def sequence_length(self) -> int:
        """Tokens of a row at the end of the curriculum."""
        return self.config.num_pairs * (2 * self.config.num_bindings + 1)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""
        return self.config.num_keys + self.config.num_values

    def draw(self, step: int) -> tuple[Batch, int]:
        """Draw all rows of a step.

        Returns:
            The rows, and how many short ones take the place of a row of full length.
        """
        config = self.config
        pairs = self.grown(config.start_pairs, config.num_pairs, step)
        times = self.grown(1, config.num_bindings, step)
        short = max(1, self.sequence_length // (pairs * (2 * times + 1)))
        generator = generator_of(config.seed, "rebinding", self.split, step)
        return rebinding_rows(config, pairs, times, config.batch_size * short, generator).batch, short
