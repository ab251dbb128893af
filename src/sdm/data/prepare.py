"""From a source to tokens on disk, once: a second run finds them by what they were made of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sdm.data.randomness import hash_of
from sdm.data.shards import FORMAT, TokenStore, TokenWriter
from sdm.data.sources import SPLITS, Source, split_documents
from sdm.data.tokenization import CHECKSUMS, Tokenizer, keep_tokenizer, load_tokenizer, train_bpe
from sdm.errors import DataError
from sdm.files import Json, new_folder, printable, remove_leftovers

logger = logging.getLogger(__name__)

BPE = "bpe:"
BPE_BYTES = 8_000_000  # more text hardly changes a small vocabulary
CHUNK_CHARACTERS = 2**20


def cache_folder(cache_dir: Path | None = None) -> Path:
    """Where tokens are kept: the given folder, or $SDM_CACHE, or sdm in the user's cache folder."""
    if cache_dir is not None:
        return cache_dir.expanduser()
    if "SDM_CACHE" in os.environ:
        return Path(os.environ["SDM_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sdm"


def prepare_tokens(
    source: Source,
    tokenizer: Tokenizer,
    split: str = "train",
    valid_fraction: float = 0.05,
    test_fraction: float = 0.05,
    cache_dir: Path | None = None,
    verify: bool = True,
) -> TokenStore:
    """The tokens of one split of a source. All splits are written in one pass."""
    description = {"name": source.name, "identity": _digest(source.identity())}
    key = _digest([FORMAT, description, tokenizer.fingerprint, valid_fraction, test_fraction])
    folder = cache_folder(cache_dir) / "tokens" / key[:32]
    if not folder.is_dir():
        logger.info("tokenizing %s into %s", printable(source.name), printable(folder))
        with _writing(f"the tokens of {source.name!r}", folder) as temporary:
            _write_splits(source, tokenizer, valid_fraction, test_fraction, temporary, description)
    store = TokenStore(folder / split, verify)
    if store.manifest["tokenizer"] != tokenizer.fingerprint or store.manifest["source"] != {
        **description,
        "split": split,
    }:
        raise DataError(f"the tokens in {folder / split} are others than it was made for; delete {folder}")
    if store.num_documents == 0:
        raise DataError(
            f"source {source.name!r}: no documents in split {split!r}; raise {split}_fraction or add documents"
        )
    return store


def prepare_tokenizer(
    spec: str,
    sources: tuple[Source, ...],
    valid_fraction: float = 0.05,
    test_fraction: float = 0.05,
    cache_dir: Path | None = None,
) -> Tokenizer:
    """What `spec` names: "byte", a tokenizer's path, or "bpe:SIZE", trained on the sources' training documents."""
    if not spec.startswith(BPE):
        return load_tokenizer(spec)
    vocab_size = spec.removeprefix(BPE)
    if not vocab_size.isdecimal() or len(vocab_size) > 9:
        raise DataError(f"tokenizer must be 'byte', 'bpe:SIZE' or a path, got {spec!r}")
    identities = [[source.name, source.identity()] for source in sources]

    def train() -> Tokenizer:
        texts = (text for source in sources for text in _sample(source, valid_fraction, test_fraction))
        return train_bpe(texts, int(vocab_size))

    return cached_tokenizer(spec, [spec, identities, valid_fraction, test_fraction, BPE_BYTES], train, cache_dir)


def cached_tokenizer(
    spec: str, identity: list[Any], train: Callable[[], Tokenizer], cache_dir: Path | None = None
) -> Tokenizer:
    """The tokenizer that `train` returns, from the cache if one of the same identity was trained before.

    Args:
        spec: Its name in messages.
        identity: JSON of everything that the tokenizer depends on.
        train: Trains it.
        cache_dir: The cache, as in `cache_folder`.
    """
    folder = cache_folder(cache_dir) / "tokenizers" / _digest([FORMAT, *identity])[:32]
    if not folder.is_dir():
        logger.info("training the tokenizer %s into %s", spec, printable(folder))
        trained = train()
        with _writing(f"the tokenizer {spec!r}", folder) as temporary:
            keep_tokenizer(trained, temporary)
    try:
        if not (folder / CHECKSUMS).is_file():
            raise DataError(f"there is no {CHECKSUMS}")
        return load_tokenizer(folder)
    except DataError as error:
        raise DataError(
            f"the tokenizer in {folder} is damaged: {error}; delete the folder to train it again"
        ) from error


@contextlib.contextmanager
def _writing(what: str, folder: Path) -> Iterator[Path]:
    """A new folder of the cache, without what a process that was killed left of it."""
    try:
        remove_leftovers(folder)
        with new_folder(folder) as temporary:
            yield temporary
    except OSError as error:  # what a source cannot read is a DataError already
        raise DataError(
            f"{what} cannot be written to {folder}: {error}; make room, or set data.cache_dir or $SDM_CACHE"
        ) from error


def _write_splits(
    source: Source, tokenizer: Tokenizer, valid_fraction: float, test_fraction: float, folder: Path, description: Json
) -> None:
    writers = {split: TokenWriter(folder / split, tokenizer, {**description, "split": split}) for split in SPLITS}
    waiting: dict[str, list[str]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    total = 0
    for split, document in split_documents(source, valid_fraction, test_fraction):
        waiting[split].append(document.text)
        sizes[split] += len(document.text)
        total += len(document.text)
        if sizes[split] >= CHUNK_CHARACTERS:
            writers[split].write(waiting[split])
            waiting[split], sizes[split] = [], 0
    if total == 0:
        raise DataError(f"source {source.name!r} is empty: none of its documents has any text")
    for split, writer in writers.items():
        writer.write(waiting[split])
        writer.finish()


def _sample(source: Source, valid_fraction: float, test_fraction: float) -> Iterator[str]:
    """About BPE_BYTES of the training documents: a stretch of each, from a place that its name decides."""
    share = min(BPE_BYTES / max(source.num_bytes() or BPE_BYTES, 1), 1)
    for split, document in split_documents(source, valid_fraction, test_fraction):
        if split == "train":
            size = math.ceil(share * len(document.text))
            start = hash_of("bpe", document.name) % (len(document.text) - size + 1)
            yield document.text[start : start + size]


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
