"""This project's own synthetic tasks, as typed settings; `published_config` has those that others have published.

A run keeps its configuration by the name of the class. These two once had the names of published tasks that they are
not: runs of that time load, and see the rows that they saw, by the `former_name`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from sdm.data.batch import Announce, BatchSource
from sdm.data.errors import DataError
from sdm.errors import check_not_negative, check_one_of, check_size

SyntheticTask = Literal[
    "in-context-recall", "fuzzy-recall", "noisy-recall", "selective-copying", "compression", "memorization"
]


@dataclass(frozen=True)
class RecallConfig:
    """Associative recall: pairs of a key and a value, then keys whose values are asked for."""

    former_name: ClassVar[str] = "MQARConfig"  # in the files of older runs

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

    def open(self, split: str, total_steps: int | None, announce: Announce) -> BatchSource:
        from sdm.data.recall import Recall

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

    def open(self, split: str, total_steps: int | None, announce: Announce) -> BatchSource:
        from sdm.data.rebinding import Rebinding

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

    def open(self, split: str, total_steps: int | None, announce: Announce) -> BatchSource:
        from sdm.data.needle import Needle

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


# Tokens of the content and length of a row, unless others are given.
SYNTHETIC_SIZES: dict[str, tuple[int, int]] = {
    "in-context-recall": (16, 128),
    "fuzzy-recall": (16, 128),
    "noisy-recall": (16, 128),
    "selective-copying": (16, 256),
    "compression": (16, 32),
    "memorization": (256, 32),
}


@dataclass(frozen=True)
class SyntheticConfig:
    """Six tasks in the manner of MAD's, in which only what a row or the task determines is predicted."""

    former_name: ClassVar[str] = "MADConfig"  # in the files of older runs

    task: SyntheticTask = "in-context-recall"
    """Which of the six."""
    num_tokens: int | None = None
    """Different tokens of the content, half of them keys and half values in the recall tasks; None: SYNTHETIC_SIZES."""
    sequence_length: int | None = None
    """Tokens of a row; None: SYNTHETIC_SIZES."""
    noise: float = 0.2
    """noisy-recall: share of the row that is noise."""
    num_copied: int = 16
    """selective-copying: tokens to copy."""
    max_motif: int = 3
    """fuzzy-recall: most tokens of one key or value."""
    batch_size: int = 128
    """Rows of a step, over all ranks and accumulated batches."""
    seed: int = 0
    """Decides every row."""

    def open(self, split: str, total_steps: int | None, announce: Announce) -> BatchSource:
        from sdm.data.synthetic import Synthetic

        return Synthetic(self, split)

    def __post_init__(self) -> None:
        check_one_of(get_args(SyntheticTask), task=self.task)
        check_size(num_copied=self.num_copied, max_motif=self.max_motif, batch_size=self.batch_size)
        check_not_negative(seed=self.seed)
        if self.num_tokens is not None and (self.num_tokens < 4 or self.num_tokens % 2):
            raise DataError(f"num_tokens must be even and at least 4, got {self.num_tokens}")
        if self.sequence_length is not None and self.sequence_length < 4:
            raise DataError(f"sequence_length must be at least 4, got {self.sequence_length}")
        if not 0 <= self.noise <= 0.9:
            raise DataError(f"noise must be between 0 and 0.9, got {self.noise}")
        if self.task == "selective-copying" and 2 * self.num_copied > self.length:
            raise DataError(f"num_copied = {self.num_copied} does not fit twice into a row of {self.length} tokens")
        if self.task == "fuzzy-recall" and 2 * self.max_motif > self.length:
            raise DataError(f"max_motif = {self.max_motif}: a key and a value do not fit into {self.length} tokens")

    @property
    def content(self) -> int:
        return SYNTHETIC_SIZES[self.task][0] if self.num_tokens is None else self.num_tokens

    @property
    def length(self) -> int:
        return SYNTHETIC_SIZES[self.task][1] if self.sequence_length is None else self.sequence_length
