"""Retrieval tasks in text, of RULER's kind, to train on: other keys, other haystacks, and phrasings drawn per row.

The rows are those of `sdm.data.retrieval_rows`. The text is the end of a corpus, because RULER's built-in essays are
its beginning; key words are those of the text without the words of RULER's lists. Rows are functions of the seed, the
split, the step and their number.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from sdm.data.batch import IGNORED, Batch, BatchSource, CurriculumRows
from sdm.data.prepare import cached_tokenizer
from sdm.data.randomness import fingerprint_of, hash_of
from sdm.data.retrieval_rows import (
    NOISE,
    TRACKING,
    Difficulty,
    Row,
    RowMaker,
    key_words,
    number,
    ruler_introduction,
    ruler_question,
    split_sentences,
)
from sdm.data.sources import open_source
from sdm.data.tokenization import Tokenizer, load_tokenizer, train_bpe
from sdm.errors import DataError, check_not_negative, check_size

VERSION = 1  # changes when the same configuration gives other rows
BPE = "bpe:"
VARIABLES = r"VAR|[A-Z](?=[A-Z])|(?<=[A-Z])[A-Z]"  # names of variables in letters, but "VAR" whole
DIGITS = 3  # of a token, as in Llama 3's tokenizer
LENGTH_STEP = 16  # tokens: lengths of the curriculum are multiples
SHORTEST_ROW = 2 * LENGTH_STEP
SHARES = ("pairs", "multivalue", "multiquery", "tracking", "text", "dense")


@dataclass(frozen=True)
class RetrievalConfig:
    """Retrieval tasks in text, of RULER's kind. What the shares leave are needles asked for one by one."""

    sequence_length: int = 512
    """Tokens of a row; with a curriculum, at its end."""
    start_length: int = 128
    """Tokens of a row at the start of the curriculum."""
    curriculum: bool = True
    """Grow rows from start_length to sequence_length between one and three fifths of the steps, and begin with few
    needles, one-word keys and short values. While rows are short, as many are put in the place of one as have its
    tokens."""
    pairs: float = 0.35
    """Share of rows with pairs, all of them asked for again; larger in the first two fifths of a curriculum."""
    multivalue: float = 0.05
    """Share of rows with several values of one key."""
    multiquery: float = 0.15
    """Share of rows with several keys in a question."""
    tracking: float = 0.0
    """Share of rows with chains of variables."""
    text: float = 0.05
    """Share of rows of plain text."""
    dense: float = 0.0
    """Share of rows that hold needles and nothing else, as many as fit, of which a few are asked for."""
    ruler_phrasing: float = 0.5
    """Share of the rows that are phrased as RULER's tasks are; the keys are others."""
    source: str = "text"
    """Haystacks and key words: the end of this source."""
    num_sentences: int = 10000
    """Sentences that are taken from the source."""
    tokenizer: str = "bpe:2176"
    """"bpe:SIZE", trained on the sentences and on rows; or a tokenizer's path."""
    digits: int = DIGITS
    """Digits of a token in numbers, 1 to 3, for "bpe:SIZE"; groups of three take 1,100 of its tokens. Models find the
    next group by the one before it: of two digits, many numbers share it."""
    batch_size: int = 8
    """Rows of a step, over all ranks and accumulated batches."""
    seed: int = 0
    """Decides every row."""
    cache_dir: Path | None = None
    """Where the tokenizer is kept; None: $SDM_CACHE, or sdm in the user's cache folder."""

    def open(self, split: str, total_steps: int | None) -> BatchSource:
        """Return the batches of a split."""
        return Retrieval(self, split, total_steps)

    def __post_init__(self) -> None:
        check_size(
            sequence_length=self.sequence_length,
            start_length=self.start_length,
            num_sentences=self.num_sentences,
            batch_size=self.batch_size,
        )
        if self.digits not in (1, 2, 3):
            raise DataError(f"digits must be 1, 2 or 3, got {self.digits}")
        check_not_negative(seed=self.seed)
        for name in (*SHARES, "ruler_phrasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise DataError(f"{name} must be a share between 0 and 1, got {getattr(self, name)}")
        if sum(getattr(self, name) for name in SHARES) > 1 + 1e-9:
            raise DataError(f"{', '.join(SHARES)} must not add up to more than 1")
        if self.curriculum and self.start_length > self.sequence_length:
            raise DataError(
                f"start_length = {self.start_length} must not exceed sequence_length = {self.sequence_length}"
            )
        if min(self.sequence_length, self.start_length) < SHORTEST_ROW:
            raise DataError(f"sequence_length and start_length must be at least {SHORTEST_ROW} tokens")


class Retrieval(CurriculumRows):
    """A `BatchSource`."""

    config: RetrievalConfig

    def __init__(self, config: RetrievalConfig, split: str = "train", total_steps: int | None = None) -> None:
        super().__init__(config, split, total_steps)
        sentences = last_sentences(config.source, config.num_sentences)
        words = key_words(sentences)
        self.tokenizer = retrieval_tokenizer(config, sentences, words)
        self._maker = RowMaker(
            self.tokenizer.encode,
            self.tokenizer.eos_id,
            sentences,
            words,
            config.ruler_phrasing,
            sparse=split == "train",
        )
        text = fingerprint_of(sentences)
        identity = replace(config, tokenizer="", digits=DIGITS, cache_dir=None)  # the tokenizer counts by what it does
        self._fingerprint = fingerprint_of(
            identity, VERSION, split, self._total_steps, text, self.tokenizer.fingerprint
        )

    @property
    def sequence_length(self) -> int:
        """Tokens of a row at the end of the curriculum."""
        return self.config.sequence_length

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""
        return self.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that the batches depend on."""
        return self._fingerprint

    def batch(self, step: int, rows: Sequence[int]) -> Batch:
        """Return the chosen rows of a step, each with the short rows that take its place."""
        config = self.config
        length = self.grown(config.start_length, config.sequence_length, step)
        length = min(-(-length // LENGTH_STEP) * LENGTH_STEP, config.sequence_length)
        short = config.sequence_length // length
        made = [self.row(step, row * short + number, length) for row in rows for number in range(short)]
        input_ids = torch.full((len(made), length), self.tokenizer.eos_id)
        targets = torch.full((len(made), length), IGNORED)
        for place, row in enumerate(made):
            ids = torch.tensor(row.ids)
            input_ids[place, : len(ids)] = ids
            # A token is the target of the place before it.
            targets[place, : len(ids) - 1] = torch.where(torch.tensor(row.predicted[1:]), ids[1:], IGNORED)
        return Batch(input_ids, targets)

    def row(self, step: int, index: int, length: int) -> Row:
        """A row of a step by its number."""
        rng = random.Random(hash_of(self.config.seed, "retrieval", self.split, step, index))
        progress = 1.0 if self._total_steps is None else step / self._total_steps
        difficulty = Difficulty(min(1.0, max(0.0, (progress - 0.08) / 0.27)), easy=progress < 0.3)
        return self._maker.row(rng, self._task(rng, progress), length, difficulty)

    def _task(self, rng: random.Random, progress: float) -> str:
        """The task of a row. Pairs get a larger share while they are learned, at the cost of all others alike."""
        config = self.config
        pairs = config.pairs
        if 0 < pairs < 1 and progress < 0.4:
            pairs = max(pairs, 0.6)
        if rng.random() < pairs:
            return "pairs"
        place = rng.random() * (1 - config.pairs)
        for name in SHARES[1:]:
            place -= getattr(config, name)
            if place < 0:
                return name
        return "needles"


@lru_cache(maxsize=2)
def last_sentences(source: str, count: int) -> tuple[str, ...]:
    """The last sentences of a source, in order, of whole documents until there are enough."""
    documents = list(open_source(source).documents())
    sentences: list[str] = []
    for document in reversed(documents):
        sentences = split_sentences(document.text) + sentences
        if len(sentences) >= count:
            return tuple(sentences[-count:])
    raise DataError(f"num_sentences = {count}: source {source!r} has {len(sentences)}; ask for fewer")


def retrieval_tokenizer(config: RetrievalConfig, sentences: Sequence[str], words: Sequence[str]) -> Tokenizer:
    """The tokenizer that a configuration names, trained once on sentences, keys and phrases."""
    if not config.tokenizer.startswith(BPE):
        return load_tokenizer(config.tokenizer)
    size = config.tokenizer.removeprefix(BPE)
    if not size.isdecimal() or len(size) > 9:
        raise DataError(f"tokenizer must be 'bpe:SIZE' or a path, got {config.tokenizer!r}")

    def train() -> Tokenizer:
        return train_bpe(texts, int(size), isolate=isolated)

    texts = _texts(sentences, words, config.digits)
    isolated = (rf"\d{{1,{config.digits}}}", VARIABLES)
    identity = ["retrieval", config.tokenizer, isolated, fingerprint_of(texts)]
    return cached_tokenizer(config.tokenizer, identity, train, config.cache_dir)


def _texts(sentences: Sequence[str], words: Sequence[str], digits: int) -> list[str]:
    """Text, phrases and keys in about equal parts; every group of digits often enough to become a token."""
    rng = random.Random(0)
    texts = list(sentences[:2500])
    for _ in range(300):
        key = f"{rng.choice(words)}-{rng.choice(words)}"
        texts += [ruler_introduction(False), ruler_question([key], False), NOISE, f" {key} is: {number(rng)}."]
        texts += [TRACKING, "VAR X = VAR Y \n"]
    texts += [f"{rng.choice(words)}-{rng.choice(words)}" for _ in range(1500)]
    groups = [f"{group:0{digits}d}" for group in range(10**digits)]
    return texts + groups * (80 if digits == 3 else 400)
