"""Batches of text: stores of tokens, mixed by weight and laid out in rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache

import torch

from sdm.data.batch import Batch
from sdm.data.config import CorpusConfig
from sdm.data.packing import ConcatenatedRows, DocumentStreams, Row
from sdm.data.prepare import prepare_tokenizer, prepare_tokens
from sdm.data.randomness import generator_of, hash_of
from sdm.data.shards import TokenStore
from sdm.data.sources import open_source
from sdm.data.tokenization import Tokenizer
from sdm.errors import DataError

BLOCK = 1024  # rows that the mixture deals at a time


def open_corpus(config: CorpusConfig, split: str = "train") -> Corpus:
    """Tokenise what is not in the cache yet, and open one split."""
    sources = tuple(open_source(spec, config.suffixes, config.text_key, config.cache_dir) for spec in config.sources)
    fractions = config.valid_fraction, config.test_fraction
    tokenizer = prepare_tokenizer(config.tokenizer, sources, *fractions, config.cache_dir)
    stores = [
        prepare_tokens(source, tokenizer, split, *fractions, config.cache_dir, config.verify) for source in sources
    ]
    return Corpus(stores, tokenizer, config, repeat=split == "train")


class Corpus:
    """A `BatchSource` over stores of tokens.

    With `repeat` the stores are mixed by weight and begin again when they end. Without, each row of each store comes
    once and the weights do not matter; places left over are padding.
    """

    def __init__(
        self, stores: Sequence[TokenStore], tokenizer: Tokenizer, config: CorpusConfig, repeat: bool = True
    ) -> None:
        self.stores, self.tokenizer, self.config, self.repeat = tuple(stores), tokenizer, config, repeat
        if repeat:
            self._check_length()
        weights = config.weights or (1.0,) * len(self.stores)
        seeds = [hash_of(config.seed, "source", i) for i in range(len(self.stores))]
        self._layout: _Rows | _Streams
        if config.layout == "stream":
            self._layout = _Streams(self.stores, weights, seeds, config, repeat)
        else:
            self._layout = _Rows(self.stores, weights, seeds, config, repeat)

    @property
    def batch_size(self) -> int:
        """Rows of a step over all ranks."""
        return self.config.batch_size

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self.config.sequence_length

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""
        return self.tokenizer.vocab_size

    @property
    def num_steps(self) -> int | None:
        """Steps until every row has come once, for a source that does not repeat; None if it repeats."""
        return None if self.repeat else self._layout.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps until the source that takes longest has been seen once."""
        return self._layout.steps_per_epoch

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that the batches depend on."""
        config = self.config
        order = [config.layout, config.sequence_length, config.batch_size, config.shuffle, config.seed, self.repeat]
        stores = [store.fingerprint for store in self.stores]
        return hashlib.sha256(json.dumps([order, config.weights, stores]).encode()).hexdigest()

    def batch(self, step: int, rows: Sequence[int]) -> Batch:
        """Return the chosen rows of the global batch of a step; with packing, concatenated to one row."""
        drawn = [self._layout.row(step, row) for row in rows]
        input_ids = torch.stack([row.input_ids for row in drawn])
        targets = torch.stack([row.targets for row in drawn])
        if self.config.layout == "rows":
            return Batch(input_ids, targets)
        if self.config.layout == "stream":
            return Batch(input_ids, targets, reset=torch.tensor([row.reset for row in drawn]))
        lengths = torch.tensor([0, *(length for row in drawn for length in row.lengths)], dtype=torch.int32)
        cu_seqlens = lengths.cumsum(0, dtype=torch.int32)
        return Batch(input_ids.view(1, -1), targets.view(1, -1), cu_seqlens)

    def _check_length(self) -> None:
        """Held-out text may be shorter than a sequence; training on mostly padding is a mistake."""
        for store in self.stores:
            if store.num_tokens < self.sequence_length:
                name, split = (store.manifest["source"][key] for key in ("name", "split"))
                raise DataError(
                    f"source {name!r} has {store.num_tokens} tokens in split {split!r}, fewer than one sequence of "
                    f"sequence_length = {self.sequence_length}; add text or shorten the sequence"
                )


class _Rows:
    """Rows that stand for themselves: any place of any batch can hold a row of any store."""

    def __init__(
        self,
        stores: Sequence[TokenStore],
        weights: Sequence[float],
        seeds: list[int],
        config: CorpusConfig,
        repeat: bool,
    ) -> None:
        length, shuffle = config.sequence_length, config.shuffle
        self._stores = [
            ConcatenatedRows(store, length, seed, shuffle) for store, seed in zip(stores, seeds, strict=True)
        ]
        self._batch_size = config.batch_size
        self._mixture = Mixture(weights, config.seed) if repeat else None
        counts = [store.num_rows for store in self._stores]
        if repeat:
            rows = max(count * sum(weights) / weight for count, weight in zip(counts, weights, strict=True))
        else:
            rows = sum(counts)
        self.steps_per_epoch = int(-(-rows // config.batch_size))

    def row(self, step: int, row: int) -> Row:
        index = step * self._batch_size + row
        if self._mixture is not None:
            source, index = self._mixture.deal(index)
            return self._stores[source].row(index)
        for store in self._stores:
            if index < store.num_rows:
                return store.row(index)
            index -= store.num_rows
        return self._stores[0].padding()


class _Streams:
    """Rows that continue those of the step before: each place of the batch belongs to one store for good."""

    def __init__(
        self,
        stores: Sequence[TokenStore],
        weights: Sequence[float],
        seeds: list[int],
        config: CorpusConfig,
        repeat: bool,
    ) -> None:
        counts = shares(weights, config.batch_size)
        for name, count in zip(config.sources, counts, strict=True):
            if count == 0:
                raise DataError(
                    f"batch_size = {config.batch_size} leaves no row for source {name!r} by its weight; "
                    "raise batch_size or the weight"
                )
        length, shuffle = config.sequence_length, config.shuffle
        self._streams = [
            DocumentStreams(store, length, count, seed, shuffle)
            for store, count, seed in zip(stores, counts, seeds, strict=True)
        ]
        self._places = [(stream, row) for stream in self._streams for row in range(stream.num_rows)]
        self._repeat = repeat
        self.steps_per_epoch = max(stream.steps_per_epoch for stream in self._streams)

    def row(self, step: int, row: int) -> Row:
        stream, place = self._places[row]
        if not self._repeat and step >= stream.steps_per_epoch:
            return stream.padding()
        return stream.row(step, place)


def shares(weights: Sequence[float], size: int) -> list[int]:
    """How many of `size` places each weight gets: the nearest whole numbers that add up (largest remainders)."""
    exact = [size * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    return counts


class Mixture:
    """Deals the numbers 0, 1, 2, ... to sources; `deal(i)` tells the source and how many it was dealt before.

    Numbers are dealt in blocks. Each block gives every source its share in an order of its own, so that the count
    before a number is the share times the blocks before, plus a look into one block: no replay.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._shares = shares(weights, BLOCK if len(weights) > 1 else 1)
        for i, share in enumerate(self._shares):
            if share == 0:
                raise DataError(f"weights[{i}] = {weights[i]} is less than 1/{BLOCK} of all weights; raise it")
        self._size = sum(self._shares)
        self._block = lru_cache(maxsize=2)(lambda block: self._shuffled(seed, block))

    def deal(self, index: int) -> tuple[int, int]:
        """Return the source of a row, and how many rows before it are of the same source."""
        block, place = divmod(index, self._size)
        source, before = self._block(block)[place]
        return source, block * self._shares[source] + before

    def _shuffled(self, seed: int, block: int) -> list[tuple[int, int]]:
        places = torch.tensor([i for i, share in enumerate(self._shares) for _ in range(share)])
        places = places[torch.randperm(self._size, generator=generator_of(seed, "mixture", block))]
        counts = [0] * len(self._shares)
        dealt = []
        for source in places.tolist():
            dealt.append((source, counts[source]))
            counts[source] += 1
        return dealt
