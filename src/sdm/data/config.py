"""What to train on, as typed settings that open their batches. An impossible value fails here and names its field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from sdm.data.batch import BatchSource
from sdm.data.facts import FactsConfig
from sdm.data.mad import MADTaskConfig
from sdm.data.mqar import MQARTaskConfig
from sdm.data.needle import NeedleConfig
from sdm.data.rebinding import RebindingConfig
from sdm.data.recall import RecallConfig
from sdm.data.retrieval import RetrievalConfig
from sdm.data.sources import SPLITS, check_fractions
from sdm.errors import DataError, check_not_negative, check_one_of, check_size

Layout = Literal["packed", "rows", "stream"]


@dataclass(frozen=True)
class CorpusConfig:
    """Text of one or more sources."""

    sources: tuple[str, ...] = ("code",)
    """"code" (the standard library), "text" (the State of the Union), "pypi" or "pypi:NAME==VERSION" (packages), files,
    folders, or "hf:NAME[:CONFIGURATION]"."""
    weights: tuple[float, ...] = ()
    """Share of the rows that each source gets; empty: equal shares."""
    suffixes: tuple[str, ...] = ()
    """Files to take from folders, such as .py; empty: .txt, .md, .jsonl (also .gz and .zst), .json, .csv
    and .parquet."""
    text_key: str = "text"
    """Field or column of the text in .jsonl, .json, .csv, .parquet and Hugging Face datasets."""
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

    def open(self, split: str, total_steps: int | None) -> BatchSource:
        """Tokenise what is not in the cache and return the batches of a split."""
        from sdm.data.corpus import open_corpus

        return open_corpus(self, split)

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("sources must name at least one source")
        for source in self.sources:
            if self.sources.count(source) > 1:
                raise DataError(f"sources names {source!r} more than once; give it a larger share with weights instead")
        if self.weights and len(self.weights) != len(self.sources):
            raise DataError(f"weights must be one per source: {len(self.sources)} expected, got {len(self.weights)}")
        for i, weight in enumerate(self.weights):
            if not 1e-100 <= weight <= 1e100:  # so that neither sums nor quotients overflow
                raise DataError(
                    f"weights[{i}] must be positive, from 1e-100 to 1e100, got {weight}; leave a source out instead"
                )
        for suffix in self.suffixes:
            if not suffix.startswith("."):
                raise DataError(f"suffixes must start with a dot, got {suffix!r}")
        if not self.tokenizer:
            raise DataError("tokenizer must be 'byte', 'bpe:SIZE' or a path, got an empty string")
        check_fractions(self.valid_fraction, self.test_fraction)
        check_one_of(get_args(Layout), layout=self.layout)
        check_size(sequence_length=self.sequence_length, batch_size=self.batch_size)
        check_not_negative(seed=self.seed)


TaskConfig = (
    RecallConfig | RebindingConfig | NeedleConfig | MQARTaskConfig | MADTaskConfig | FactsConfig | RetrievalConfig
)
# Each opens the batches that it describes; the source, which knows its configuration, is imported then.
DataConfig = CorpusConfig | TaskConfig
TextConfig = CorpusConfig | RetrievalConfig
"""Data that is text, made of tokens of a tokenizer."""


def open_data(config: DataConfig, split: str = "train", total_steps: int | None = None) -> BatchSource:
    """The batches that a config describes.

    Args:
        config: of a corpus or of a synthetic task.
        split: "train", or one of the held-out "valid" and "test". A held-out corpus ends after one epoch.
        total_steps: of the whole training, for curricula.
    """
    if split not in SPLITS:
        raise DataError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if not isinstance(config, DataConfig):
        raise DataError(f"config must be a CorpusConfig or that of a synthetic task, got {type(config).__name__}")
    return config.open(split, total_steps)
