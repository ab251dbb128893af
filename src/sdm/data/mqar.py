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

import torch

from sdm.data.batch import IGNORED, Batch
from sdm.data.published_config import MQARTaskConfig
from sdm.data.randomness import Permutation, fingerprint_of, generator_of

HELD_OUT_SHARE = 8  # rows of a training batch for one of a held-out batch, whose rows are longer


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
        return self.config.batch_size if self.split == "train" else max(1, self.config.batch_size // HELD_OUT_SHARE)

    @property
    def sequence_length(self) -> int:
        segments = self.config.train_segments if self.split == "train" else self.config.test_segments
        return max(segment[0] for segment in segments)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.config, self.split)

    def batch(self, step: int, rows: Sequence[int]) -> Batch:
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
