"""Needles in a haystack of tokens: a few pairs hidden in a long row that says nothing else.

A row is random filler, in which `num_needles` pairs `key value` stand somewhere; at its end each of their keys is asked
for once. Tokens 0 ... num_keys - 1 are keys, then come the values, then the filler. What is hard is the length of the
row and not the number of pairs: a model has to keep a few values and to ignore everything else.

Shapes: B rows, L tokens of a row, K needles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sdm.data.batch import IGNORED, Batch, BatchSource, CurriculumRows
from sdm.data.randomness import generator_of
from sdm.errors import DataError, check_not_negative, check_size


@dataclass(frozen=True)
class NeedleConfig:
    """A few pairs hidden in a long row of filler, asked for at its end."""

    sequence_length: int = 1024
    """Tokens of a row, queries included; with a curriculum, at its end."""
    start_length: int = 32
    """Tokens of a row at the start of the curriculum."""
    curriculum: bool = True
    """Grow the row: start_length for a fifth of the steps, then exponentially up to sequence_length at three fifths.
    While rows are short, as many are put in the place of one as have its tokens."""
    num_needles: int = 4
    """Pairs of a row, all of them asked for."""
    num_keys: int = 64
    """Different keys; those of a row are distinct."""
    num_values: int = 64
    """Different values."""
    num_fillers: int = 128
    """Different tokens of the filler."""
    batch_size: int = 32
    """Rows of a step, over all ranks and accumulated batches."""
    seed: int = 0
    """Decides every row."""

    def open(self, split: str, total_steps: int | None) -> BatchSource:
        """Return the batches of a split."""
        return Needle(self, split, total_steps)

    def __post_init__(self) -> None:
        check_size(
            sequence_length=self.sequence_length,
            start_length=self.start_length,
            num_needles=self.num_needles,
            num_keys=self.num_keys,
            num_values=self.num_values,
            num_fillers=self.num_fillers,
            batch_size=self.batch_size,
        )
        check_not_negative(seed=self.seed)
        if self.num_needles > self.num_keys:
            raise DataError(
                f"num_needles = {self.num_needles} needs as many distinct keys; num_keys is {self.num_keys}"
            )
        names = ["sequence_length"] + ["start_length"] * self.curriculum
        for name in names:
            if getattr(self, name) < 3 * self.num_needles:
                raise DataError(f"{name} must be at least {3 * self.num_needles}, three tokens a needle")
        if self.curriculum and self.start_length > self.sequence_length:
            raise DataError(
                f"start_length = {self.start_length} must not exceed sequence_length = {self.sequence_length}"
            )


@dataclass(frozen=True)
class Haystack:
    """Rows, and where their needles are."""

    batch: Batch
    depth_BK: Tensor
    """Place of each queried needle, from 0 at the row's start to 1 where the queries begin, in the order of the
    queries."""


def needle_rows(config: NeedleConfig, length: int, rows: int, generator: torch.Generator) -> Haystack:
    """`rows` rows of `length` tokens, the queries included."""
    count = config.num_needles
    places = (length - count) // 2  # of two tokens each, before the queries
    if places < count:
        raise DataError(f"length must be at least {3 * count} for {count} needles, got {length}")
    keys_BK = torch.rand(rows, config.num_keys, generator=generator).argsort(-1)[:, :count]
    values_BK = config.num_keys + torch.randint(config.num_values, (rows, count), generator=generator)
    place_BK = torch.rand(rows, places, generator=generator).argsort(-1)[:, :count]
    first_filler = config.num_keys + config.num_values
    input_ids = first_filler + torch.randint(config.num_fillers, (rows, length), generator=generator)
    input_ids.scatter_(1, 2 * place_BK, keys_BK)
    input_ids.scatter_(1, 2 * place_BK + 1, values_BK)
    # Needles were drawn in random order, and so are the queries.
    input_ids[:, length - count :] = keys_BK
    targets = torch.full_like(input_ids, IGNORED)
    targets[:, length - count :] = values_BK
    return Haystack(Batch(input_ids, targets), place_BK / max(places - 1, 1))


class Needle(CurriculumRows):
    """A `BatchSource`."""

    config: NeedleConfig

    @property
    def sequence_length(self) -> int:
        """Tokens of a row at the end of the curriculum."""
        return self.config.sequence_length

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""
        return self.config.num_keys + self.config.num_values + self.config.num_fillers

    def draw(self, step: int) -> tuple[Batch, int]:
        """Draw all rows of a step.

        Returns:
            The rows, and how many short ones take the place of a row of full length.
        """
        config = self.config
        length = self.grown(config.start_length, config.sequence_length, step)
        short = config.sequence_length // length
        generator = generator_of(config.seed, "needle", self.split, step)
        return needle_rows(config, length, config.batch_size * short, generator).batch, short
