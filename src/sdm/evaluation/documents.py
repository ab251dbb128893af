"""Held-out documents: which texts a model is measured on, and how they are found again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sdm.data.config import CorpusConfig
from sdm.data.prepare import prepare_tokens
from sdm.data.shards import TokenStore
from sdm.data.sources import BUILT_IN, Document, Source, is_named, open_source, split_documents
from sdm.data.tokenization import Tokenizer
from sdm.errors import DataError, UserError
from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.measurement import Measurement

Split = Literal["auto", "train", "valid", "test", "all"]


@dataclass(frozen=True)
class HeldOut:
    """The documents of one split of a source."""

    source: Source
    split: str
    """"train", "valid", "test" or "all"."""
    valid_fraction: float
    test_fraction: float
    cache_dir: Path | None

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.name

    def documents(self) -> Iterator[Document]:
        """Those with any text."""
        if self.split == "all":
            yield from (document for document in self.source.documents() if document.text)
            return
        for split, document in split_documents(self.source, self.valid_fraction, self.test_fraction):
            if split == self.split and document.text:
                yield document

    def tokens(self, tokenizer: Tokenizer) -> TokenStore:
        """The same as tokens, kept in the cache."""
        split, fractions = self.split, (self.valid_fraction, self.test_fraction)
        if split == "all":
            split, fractions = "train", (0.0, 0.0)
        return prepare_tokens(self.source, tokenizer, split, *fractions, self.cache_dir)

    def manifest(self) -> dict[str, Any]:
        """Source and split as JSON, for results."""
        return {
            "source": self.name,
            "split": self.split,
            "valid_fraction": self.valid_fraction,
            "test_fraction": self.test_fraction,
        }


@dataclass(frozen=True)
class TextMeasurement(Measurement):
    """Base of the measurements on text."""

    data: tuple[str, ...] = ()
    """"code" (the standard library), "text" (the State of the Union), "pypi" or "pypi:NAME==VERSION" (packages), files,
    folders, or "hf:NAME[:CONFIGURATION]". None: what the run was trained on."""
    split: Split = "auto"
    """Which documents of a source. auto: those of a run's own sources and of "code", "text" and "pypi" that are
    held out from training and from choices (test); all of any other source, which you hold out yourself."""
    suffixes: tuple[str, ...] = ()
    """Files to take from folders, such as .py; none: .txt, .md, .jsonl (also .gz and .zst) and .parquet."""
    text_key: str = "text"
    """Field or column of the text in .jsonl, .parquet and Hugging Face datasets."""

    def held_out(self, lm: EvalModel) -> list[HeldOut]:
        """What a model is measured on."""
        places = [spec if is_named(spec) else str(Path(spec).expanduser().resolve()) for spec in self.data]
        for spec, place in zip(self.data, places, strict=True):
            if places.count(place) > 1:
                raise UserError(f"--data names {spec!r} more than once; its documents would count twice")
        trained = None
        if lm.run is not None and isinstance(config := lm.run.config().data, CorpusConfig):
            trained = config
        if not self.data and trained is None:
            raise UserError(f"--data: {lm.name} is no run that was trained on text; name sources, such as code")
        _ = lm.tokenizer  # or why there is none
        return [self._held_out(spec, trained) for spec in self.data or (trained.sources if trained else ())]

    def _held_out(self, spec: str, trained: CorpusConfig | None) -> HeldOut:
        own = trained is not None and spec in trained.sources
        defaults = trained if own and trained is not None else CorpusConfig()
        split = self.split
        if split == "auto":
            split = "test" if own or spec in BUILT_IN else "all"
        suffixes, text_key = self.suffixes, self.text_key
        if own and not self.data:
            suffixes, text_key = defaults.suffixes, defaults.text_key
        cache_dir = None if trained is None else trained.cache_dir
        source = open_source(spec, suffixes, text_key, cache_dir)
        return HeldOut(source, split, defaults.valid_fraction, defaults.test_fraction, cache_dir)


class Reader:
    """Documents one after the other. They are asked for by number, in ascending order: a source is never in memory."""

    def __init__(self, held_out: HeldOut) -> None:
        self._held_out, self._next = held_out, 0
        self._rest: Iterator[Document] = iter(())

    def document(self, number: int) -> Document:
        """Return the document of a number."""
        if self._next == 0 or number < self._next:
            self._rest, self._next = self._held_out.documents(), 0
        for document in self._rest:
            self._next += 1
            if self._next == number + 1:
                return document
        raise DataError(f"source {self._held_out.name!r} has changed while it was read: document {number} is gone")


@dataclass(frozen=True)
class Listing:
    """What is in a split: names and sizes, and a checksum over everything."""

    names: list[str]
    num_bytes: list[int]
    sha256: str


def listing(held_out: HeldOut) -> Listing:
    """Reads everything once."""
    names, sizes, digest = [], [], hashlib.sha256()
    for document in held_out.documents():
        data = document.text.encode()
        names.append(document.name)
        sizes.append(len(data))
        digest.update(f"{document.name}\0{len(data)}\0".encode(errors="surrogateescape"))  # names need not be text
        digest.update(data)
    if not names:
        raise DataError(f"source {held_out.name!r}: no documents in split {held_out.split!r}; set split, or add text")
    return Listing(names, sizes, digest.hexdigest())
