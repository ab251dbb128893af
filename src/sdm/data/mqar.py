"""Multi-query associative recall (MQAR) as Zoology defines it.

A row begins with K pairs `key value`, all different. Each key comes once more, with its value as the target; the places
where the keys are asked are drawn by a power law, most of them soon after the pairs, and what stands between them is
random tokens. Token 0 is never a key; the lower half of the others are keys, the upper half of all tokens values.

Every row of the training set is a function of its number, every batch of its step: a segment of the set, then rows of
it. Each epoch has an order of its own. What does not fill a batch is left out of the epoch.

Shapes: L tokens of a row, K pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sdm.data.batch import IGNORED, Batch, BatchSource
from sdm.data.randomness import Permutation, fingerprint_of, generator_of
from sdm.errors import DataError, check_not_negative, check_size

HELD_OUT_SHARE = 8  # rows of a training batch for one of a held-out batch, whose rows are longer


@dataclass(frozen=True)
class MQARTaskConfig:
    """Multi-query associative recall (MQAR) of "Zoology: Measuring and Improving Recall in Efficient Language Models".

    The segments are those of the comparison of states in "Simple linear attention language models balance the
    recall-throughput tradeoff", with which later papers measure.
    """

    vocab_size: int = 8192
    """Different tokens: 0, then keys up to the middle, then values."""
    train_segments: tuple[tuple[int, int, int], ...] = (
        (64, 4, 100_000),
        (128, 8, 20_000),
        (256, 16, 20_000),
        (256, 32, 20_000),
        (256, 64, 20_000),
    )
    """Tokens of a row, pairs and number of rows of each part of the training set, which repeats in every epoch."""
    test_segments: tuple[tuple[int, int], ...] = (
        (64, 4),
        (64, 8),
        (64, 16),
        (128, 32),
        (256, 64),
        (512, 128),
        (1024, 256),
    )
    """Tokens of a row and pairs of the held-out rows; batches take turns."""
    power: float = 0.01
    """The gap between the pairs and a query is i places with a likelihood as i^(power - 1); 1: all alike."""
    random_filler: bool = True
    """Fill the places that are not asked with random tokens; otherwise with token 0."""
    batch_size: int = 256
    """Rows of a step, over all ranks and accumulated batches. A held-out batch has an eighth of them."""
    seed: int = 0
    """Decides every row."""

    def open(self, split: str, total_steps: int | None) -> BatchSource:
        """Return the batches of a split."""
        return MQAR(self, split)

    def __post_init__(self) -> None:
        check_size(batch_size=self.batch_size)
        if not 0 < self.power <= 1:
            raise DataError(f"power must be above 0 and at most 1, got {self.power}")
        check_not_negative(seed=self.seed)
        for name, segments in (("train_segments", self.train_segments), ("test_segments", self.test_segments)):
            if not segments:
                raise DataError(f"{name} must not be empty")
            for length, pairs, *_ in segments:
                if pairs < 1 or length % 2 or length < 4 * pairs:
                    raise DataError(
                        f"{name}: a row must be even and have four tokens a pair, got {length} with {pairs} pairs"
                    )
                if pairs > self.vocab_size // 2 - 1:
                    raise DataError(f"vocab_size = {self.vocab_size} has not the keys for {pairs} pairs")
        for _, _, rows in self.train_segments:
            if rows < self.batch_size:
                raise DataError(f"train_segments: {rows} rows are less than batch_size = {self.batch_size}")

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; rows that do not fill a batch are left out."""
        return sum(rows // self.batch_size for _, _, rows in self.train_segments)


def mqar_row(
    config: MQARTaskConfig, length: int, num_pairs: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [L] and targets [L]."""
    half = config.vocab_size // 2
    keys_K = 1 + torch.randperm(half - 1, generator=generator)[:num_pairs]
    values_K = half + torch.randperm(config.vocab_size - half, generator=generator)[:num_pairs]
    places = (length - 2 * num_pairs) // 2
    likelihood = torch.arange(1, places + 1, dtype=torch.float64) ** (config.power - 1)
    gaps_K = torch.multinomial(likelihood, num_pairs, replacement=False, generator=generator)
    asked_K = 2 * num_pairs + 2 * gaps_K

    tokens = torch.zeros(length, dtype=torch.int64)
    if config.random_filler:
        tokens = torch.randint(config.vocab_size, (length,), generator=generator)
    tokens[: 2 * num_pairs] = torch.stack((keys_K, values_K), -1).flatten()
    tokens[asked_K] = keys_K
    targets = torch.full_like(tokens, IGNORED)
    targets[asked_K] = values_K
    return tokens, targets


class MQAR:
    """A `BatchSource`. Held-out batches take turns in the test segments, the first one the first."""

    num_steps = None

    def __init__(self, config: MQARTaskConfig, split: str = "train") -> None:
        self.config, self.split = config, split

    @property
    def batch_size(self) -> int:
        """Rows of a step over all ranks; held-out batches have an eighth of the rows."""
        return self.config.batch_size if self.split == "train" else max(1, self.config.batch_size // HELD_OUT_SHARE)

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest row of the split."""
        segments = self.config.train_segments if self.split == "train" else self.config.test_segments
        return max(segment[0] for segment in segments)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""
        return self.config.vocab_size

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that the batches depend on."""
        return fingerprint_of(self.config, self.split)

    def batch(self, step: int, rows: Sequence[int]) -> Batch:
        """Return the chosen rows of the global batch of a step; all its rows are of one segment."""
        config, seed = self.config, self.config.seed
        if self.split == "train":
            segment, numbers = self._training_rows(step, rows)
            length, pairs, _ = config.train_segments[segment]
            names = [("train", segment, number) for number in numbers]
        else:
            segment = step % len(config.test_segments)
            length, pairs = config.test_segments[segment]
            names = [(self.split, step, row) for row in rows]
        made = [mqar_row(config, length, pairs, generator_of(seed, "multi-query", *name)) for name in names]
        tokens, targets = zip(*made, strict=True)
        return Batch(torch.stack(tokens), torch.stack(targets))

    def _training_rows(self, step: int, rows: Sequence[int]) -> tuple[int, list[int]]:
        """The segment of a step and the numbers of its rows."""
        config = self.config
        epoch, place = divmod(step, config.steps_per_epoch)
        batch = Permutation(config.steps_per_epoch, config.seed, "batches", epoch)[place]
        for segment, (_, _, count) in enumerate(config.train_segments):
            if batch < count // config.batch_size:
                order = Permutation(count, config.seed, "rows", segment, epoch)
                return segment, [order[batch * config.batch_size + row] for row in rows]
            batch -= count // config.batch_size
        raise AssertionError("the batches of an epoch are those of its segments")
