"""What to train on, as typed settings. A value that cannot work fails here and names its field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from sdm.data.errors import DataError, check_not_negative, check_one_of, check_positive
from sdm.data.splits import check_fractions

Layout = Literal["packed", "rows", "stream"]
MADTask = Literal[
    "in-context-recall", "fuzzy-recall", "noisy-recall", "selective-copying", "compression", "memorization"
]


@dataclass(frozen=True)
class CorpusConfig:
    """Text of one or more sources."""

    sources: tuple[str, ...] = ("code",)
    """"code" (the standard library), "text" (the State of the Union), files, folders, or "hf:NAME[:CONFIGURATION]"."""
    weights: tuple[float, ...] = ()
    """Share of the rows that each source gets; empty: equal shares."""
    suffixes: tuple[str, ...] = ()
    """Files to take from folders, such as .py; empty: .txt, .md, .jsonl (also .gz and .zst) and .parquet."""
    text_key: str = "text"
    """Field or column of the text in .jsonl, .parquet and Hugging Face datasets."""
    tokenizer: str = "byte"
    """"byte", "bpe:SIZE" (trained on the training documents), or the path of a tokenizer.json or its folder."""
    valid_fraction: float = 0.05
    """Share of the documents held out to make choices by."""
    test_fraction: float = 0.05
    """Share of the documents held out to report on."""
    layout: Layout = "packed"
    """packed: documents kept apart by cu_seqlens; rows: one after the other in plain rows, not kept apart; stream:
    pieces of one document in consecutive steps, to carry the state over."""
    sequence_length: int = 2048
    """Tokens of a row."""
    batch_size: int = 8
    """Rows of a step, over all ranks and accumulated batches."""
    shuffle: bool = True
    """A new random order in every epoch; otherwise the order of the sources."""
    seed: int = 0
    """Decides the order and the mixture."""
    cache_dir: Path | None = None
    """Where tokens are kept; None: $SDM_CACHE, or sdm in the user's cache folder."""
    verify: bool = True
    """Compare the checksums of cached tokens, which reads them once at the start."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("sources must name at least one source")
        if self.weights and len(self.weights) != len(self.sources):
            raise DataError(f"weights must be one per source: {len(self.sources)} expected, got {len(self.weights)}")
        for i, weight in enumerate(self.weights):
            if not 0 < weight < float("inf"):
                raise DataError(f"weights[{i}] must be positive and finite, got {weight}; leave a source out instead")
        for suffix in self.suffixes:
            if not suffix.startswith("."):
                raise DataError(f"suffixes must start with a dot, got {suffix!r}")
        if not self.tokenizer:
            raise DataError("tokenizer must be 'byte', 'bpe:SIZE' or a path, got an empty string")
        check_fractions(self.valid_fraction, self.test_fraction)
        check_one_of(get_args(Layout), layout=self.layout)
        check_positive(sequence_length=self.sequence_length, batch_size=self.batch_size)
        check_not_negative(seed=self.seed)


@dataclass(frozen=True)
class MQARConfig:
    """Multi-query associative recall: pairs of a key and a value, then keys whose values are asked for."""

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

    def __post_init__(self) -> None:
        check_positive(
            num_pairs=self.num_pairs,
            start_pairs=self.start_pairs,
            num_keys=self.num_keys,
            num_values=self.num_values,
            batch_size=self.batch_size,
        )
        check_not_negative(seed=self.seed)
        if self.num_queries is not None:
            check_positive(num_queries=self.num_queries)
        if self.num_pairs > self.num_keys:
            raise DataError(f"num_pairs = {self.num_pairs} needs as many distinct keys; num_keys is {self.num_keys}")
        if self.curriculum and self.start_pairs > self.num_pairs:
            raise DataError(f"start_pairs = {self.start_pairs} must not exceed num_pairs = {self.num_pairs}")


# Vocabulary and length of the baseline of each task in the MAD paper.
MAD_BASELINES: dict[str, tuple[int, int]] = {
    "in-context-recall": (16, 128),
    "fuzzy-recall": (16, 128),
    "noisy-recall": (16, 128),
    "selective-copying": (16, 256),
    "compression": (16, 32),
    "memorization": (256, 32),
}


@dataclass(frozen=True)
class MADConfig:
    """The synthetic tasks of "Mechanistic Design and Scaling of Hybrid Architectures" (MAD)."""

    task: MADTask = "in-context-recall"
    """Which of the six."""
    num_tokens: int | None = None
    """Different tokens of the content, half of them keys and half values in the recall tasks; None: the baseline's."""
    sequence_length: int | None = None
    """Tokens of a row; None: the baseline's."""
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

    def __post_init__(self) -> None:
        check_one_of(get_args(MADTask), task=self.task)
        check_positive(num_copied=self.num_copied, max_motif=self.max_motif, batch_size=self.batch_size)
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
        return MAD_BASELINES[self.task][0] if self.num_tokens is None else self.num_tokens

    @property
    def length(self) -> int:
        return MAD_BASELINES[self.task][1] if self.sequence_length is None else self.sequence_length


DataConfig = CorpusConfig | MQARConfig | MADConfig
