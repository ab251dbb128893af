"""Synthetic tasks that others have published, as typed settings. The defaults are theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sdm.data.batch import Announce, BatchSource
from sdm.data.errors import DataError
from sdm.errors import check_not_negative, check_one_of, check_size

MADTask = Literal[
    "in-context-recall",
    "fuzzy-in-context-recall",
    "noisy-in-context-recall",
    "selective-copying",
    "memorization",
    "compression",
]


@dataclass(frozen=True)
class MADBaseline:
    """The easiest setting of a task of MAD, from which its benchmark varies one value at a time."""

    vocab_size: int
    sequence_length: int
    num_examples: int


MAD_BASELINES: dict[str, MADBaseline] = {
    "in-context-recall": MADBaseline(16, 128, 12_800),
    "fuzzy-in-context-recall": MADBaseline(16, 128, 12_800),
    "noisy-in-context-recall": MADBaseline(32, 128, 12_800),
    "selective-copying": MADBaseline(16, 256, 12_800),
    "memorization": MADBaseline(256, 32, 256),
    "compression": MADBaseline(16, 32, 12_800),
}


@dataclass(frozen=True)
class MADTaskConfig:
    """The tasks of "Mechanistic Design and Scaling of Hybrid Architectures" (MAD)."""

    task: MADTask = "in-context-recall"
    """Which of the six."""
    vocab_size: int | None = None
    """Different tokens, special ones and noise included; None: the baseline's."""
    sequence_length: int | None = None
    """Tokens of a row as MAD counts them; None: the baseline's."""
    num_examples: int | None = None
    """Rows of the training set, which repeat in a new order in every epoch; None: the baseline's."""
    noise_fraction: float = 0.2
    """noisy-in-context-recall: how likely a pair is replaced by two tokens of noise."""
    noise_vocab_size: int = 16
    """noisy-in-context-recall: how many of the tokens are noise."""
    num_copied: int = 16
    """selective-copying: tokens to copy."""
    key_motif: int = 3
    """fuzzy-in-context-recall: most tokens of a key; keys of held-out rows all have so many."""
    value_motif: int = 3
    """fuzzy-in-context-recall: most tokens of a value."""
    batch_size: int = 128
    """Rows of a step, over all ranks and accumulated batches."""
    seed: int = 0
    """Decides every row, and in memorization the values."""

    def open(self, split: str, total_steps: int | None, announce: Announce) -> BatchSource:
        from sdm.data.mad import MAD

        return MAD(self, split)

    def __post_init__(self) -> None:
        check_one_of(get_args(MADTask), task=self.task)
        check_size(
            num_examples=self.examples,
            noise_vocab_size=self.noise_vocab_size,
            num_copied=self.num_copied,
            key_motif=self.key_motif,
            value_motif=self.value_motif,
            batch_size=self.batch_size,
        )
        check_not_negative(seed=self.seed)
        if not 0 <= self.noise_fraction < 1:
            raise DataError(f"noise_fraction must be at least 0 and below 1, got {self.noise_fraction}")
        noise = self.noise_vocab_size if self.task == "noisy-in-context-recall" else 0
        if self.vocabulary - noise < 5:
            raise DataError(f"vocab_size must leave 5 tokens beside the noise, got {self.vocabulary}")
        if self.length < 4 or self.length % 2:
            raise DataError(f"sequence_length must be even and at least 4, got {self.length}")
        if self.task == "selective-copying" and self.length <= 2 * self.num_copied + 1:
            raise DataError(f"num_copied = {self.num_copied} needs a sequence_length above {2 * self.num_copied + 1}")
        if self.task == "fuzzy-in-context-recall":
            most = (self.vocabulary - 1) // 2
            if max(self.key_motif, self.value_motif) > most:
                raise DataError(f"key_motif and value_motif must be at most {most}, the tokens that they have")
            if self.length < 4 * (self.key_motif + self.value_motif):
                raise DataError(f"key_motif and value_motif need a sequence_length of four of each, got {self.length}")

    @property
    def vocabulary(self) -> int:
        return MAD_BASELINES[self.task].vocab_size if self.vocab_size is None else self.vocab_size

    @property
    def length(self) -> int:
        return MAD_BASELINES[self.task].sequence_length if self.sequence_length is None else self.sequence_length

    @property
    def examples(self) -> int:
        return MAD_BASELINES[self.task].num_examples if self.num_examples is None else self.num_examples


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

    def open(self, split: str, total_steps: int | None, announce: Announce) -> BatchSource:
        from sdm.data.mqar import MQAR

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
        return sum(rows // self.batch_size for _, _, rows in self.train_segments)
