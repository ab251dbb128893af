"""Tokenizers: bytes, which need no files, and any tokenizer.json, through one small type.

Byte-level BPE looks words up: the words that the tokenizer cuts a text into are encoded independently and repeat a lot.
Cutting with Python's regular expressions and encoding each word once takes a quarter of the time that the library takes
for the whole text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from sdm.errors import DataError
from sdm.files import (
    DamagedFile,
    open_regular,
    read_checked_json,
    read_json,
    write_bytes,
    write_checked_json,
    write_json,
)

# The pattern of GPT-2, which the library's byte-level pre-tokenizer uses, for ASCII text.
WORDS = re.compile(
    r"'(?:[stmd]|re|ve|ll)| ?(?:[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]+)|\s+(?!\S)|\s+",
    re.ASCII,
)
# No word spans such a place, so a text may be cut there and its non-ASCII pieces left to the library.
LINE_ENDS = re.compile(r"(?<=[!-~])(?=\n)")
SPACES = re.compile(r"(?<=[!-~])(?=[ \n])")
MAX_BYTES = 2**27
ENTRY_BYTES = 100  # of a dictionary, about, beside the word and its ids


class WordCache(dict[str, bytes]):
    """Maps a word to its ids, as bytes; a word that is not there is encoded, and kept while there is room."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._bytes = 0

    @staticmethod
    def serves(tokenizer: tokenizers.Tokenizer) -> bool:
        """Whether looking up words gives exactly what the tokenizer gives."""
        parts = json.loads(tokenizer.to_str())
        cut, model = parts["pre_tokenizer"] or {}, parts["model"]
        return (
            parts["normalizer"] is None
            and model["type"] == "BPE"
            and not model.get("dropout")
            and cut.get("type") == "ByteLevel"
            and cut["use_regex"]
            and not cut["add_prefix_space"]
            and all(token["special"] for token in parts["added_tokens"])
        )

    def __missing__(self, word: str) -> bytes:
        ids = array("i", self._tokenizer.encode(word, add_special_tokens=False).ids).tobytes()
        if word.isascii():  # other pieces may be whole documents, which hardly come again
            self._bytes += sys.getsizeof(word) + sys.getsizeof(ids) + ENTRY_BYTES
            if self._bytes > MAX_BYTES:
                self.clear()
                self._bytes = 0
            else:
                self[word] = ids
        return ids

    def encode(self, text: str) -> Tensor:
        """int32 ids."""
        if text.isascii():
            words = WORDS.findall(text)
        else:
            words = []
            for piece in LINE_ENDS.split(text):
                words += WORDS.findall(piece) if piece.isascii() else SPACES.split(piece)
        ids = bytearray().join(map(self.__getitem__, words))
        return torch.frombuffer(ids, dtype=torch.int32) if ids else torch.empty(0, dtype=torch.int32)


END_OF_TEXT = "<|endoftext|>"
# What tokenizers call the token between documents, tried where no tokenizer_config.json says it.
COMMON_EOS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
SMALLEST_VOCABULARY = 257  # the bytes and the token between documents
# Training takes time quadratic in the longest word, so that long runs are cut into pieces of fewer than two blocks.
# Ordinary text has none: the longest word of the built-in corpora has 96 characters. Encoding does not cut.
BLOCK = 512  # characters
_SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_RUN = re.compile(rf"[^\W_]+|[{_SPACES}]+|(?:[^\w{_SPACES}]|_)+")

FILES = ("tokenizer.json", "tokenizer_config.json")
CHECKSUMS = "checksums.json"  # beside the files of a tokenizer that is kept for a run or in the cache


class Tokenizer(Protocol):
    """Text to token ids and back. `eos_id` stands before every document and is what follows its last token."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids: one more than the largest."""

    @property
    def eos_id(self) -> int:
        """Id of the token that stands before every document."""

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give the same ids."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; nothing is added, and names of special tokens are ordinary text."""

    def encode_batch(self, texts: Sequence[str]) -> list[Tensor]:
        """One int32 tensor per text. Nothing is added, and the names of special tokens are text like any other."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text without special tokens."""

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer reads."""


class HFTokenizer:
    """A tokenizer of the Hugging Face `tokenizers` library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos_token: str, config: dict[str, Any] | None = None) -> None:
        """config: what tokenizer_config.json holds; None writes one for a plain text model."""
        eos_id = tokenizer.token_to_id(eos_token)
        if eos_id is None:
            raise DataError(f"eos_token {eos_token!r} is not in the tokenizer's vocabulary")
        self.eos_id: int = eos_id
        self._tokenizer = tokenizer
        # A document that mentions a special token must not be able to end itself.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._words = WordCache(tokenizer) if WordCache.serves(tokenizer) else None
        self._config = {**(config or {})} or {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": eos_token,
            "eos_token": eos_token,
            "pad_token": eos_token,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**18,
        }
        if self._config.get("pad_token") is None:  # collators and batched generation need one
            self._config["pad_token"] = eos_token

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids: one more than the largest."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's definition: equal for tokenizers that give the same ids."""
        return _sha256(self._tokenizer.to_str(), str(self.eos_id))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; nothing is added, and names of special tokens are ordinary text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[Tensor]:
        """Return an int32 tensor of token ids for each text, equal to those of `encode`."""
        if self._words is not None:
            return [self._words.encode(text) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [torch.tensor(encoding.ids, dtype=torch.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; special tokens are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer reads."""
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / "tokenizer.json", self._tokenizer.to_str(pretty=True).encode())
        write_json(folder / "tokenizer_config.json", self._config)


class ByteTokenizer:
    """The 256 bytes of UTF-8 and one token between documents."""

    vocab_size = 257
    eos_id = 256

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's definition: equal for tokenizers that give the same ids."""
        return self._as_hf().fingerprint

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; nothing is added, and names of special tokens are ordinary text."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[Tensor]:
        """Return an int32 tensor of token ids for each text, equal to those of `encode`."""
        return [
            torch.frombuffer(bytearray(text.encode("utf-8")), dtype=torch.uint8).to(torch.int32)
            if text
            else torch.empty(0, dtype=torch.int32)
            for text in texts
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; special tokens are left out."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer reads."""
        self._as_hf().save(folder)

    def _as_hf(self) -> HFTokenizer:
        """The same ids from a byte-level BPE without merges, for transformers."""
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=_byte_alphabet(), merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END_OF_TEXT])
        return HFTokenizer(tokenizer, END_OF_TEXT)


def train_bpe(texts: Iterable[str], vocab_size: int, *, isolate: Sequence[str] = ()) -> HFTokenizer:
    """A tokenizer of `vocab_size` ids whose merges are the most frequent ones of the texts.

    Args:
        texts: What merges are counted in.
        vocab_size: Number of ids.
        isolate: Regular expressions whose matches become words of their own, which no merge crosses: `\\d{1,3}` cuts
            numbers into groups of three digits.

    Any text can be encoded, whatever it was trained on: every byte has an id. A small text may not have enough
    different words to fill the vocabulary; that is an error, because a model would be built for ids that never occur.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"vocab_size must be at least {SMALLEST_VOCABULARY}, one id per byte and one more, got {vocab_size}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in isolate]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level]) if cuts else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = iter(texts)
    some = next(filter(None, texts), None)
    if some is None:
        raise DataError("the source is empty: there is no text to train a tokenizer on")
    pieces = (piece for text in itertools.chain([some], texts) for piece in cut_runs(text))
    tokenizer.train_from_iterator(pieces, trainer)
    trained = tokenizer.get_vocab_size()
    if trained < vocab_size:
        raise DataError(f"the text only gives {trained} tokens; set vocab_size to at most that, or train on more text")
    return HFTokenizer(tokenizer, END_OF_TEXT)


def cut_runs(text: str) -> Iterator[str]:
    """The text in pieces, cut before every block that is all letters and digits, all spaces or all other signs."""
    start = 0
    for place in range(BLOCK, len(text) - BLOCK + 1, BLOCK):
        if _RUN.fullmatch(text, place, place + BLOCK):
            yield text[start:place]
            start = place
    yield text[start:]


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer that `spec` names: "byte", a folder with a tokenizer.json, or that file."""
    if spec == "byte":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"tokenizer {str(spec)!r}: expected 'byte', a tokenizer.json or its folder; {file} is not there"
        )
    try:
        _check_kept(file.parent)
        config = read_json(file.with_name(FILES[1])) if file.with_name(FILES[1]).is_file() else None
        with open_regular(file) as stream:
            content = stream.read().decode("utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer {str(spec)!r} cannot be read: {error}; restore or remove it") from error
    tokenizer = _parse(content, spec, file)
    loaded = HFTokenizer(tokenizer, _eos_token(tokenizer, config or {}, file), config)
    byte = ByteTokenizer()
    return byte if loaded.fingerprint == byte.fingerprint else loaded


def keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Save a tokenizer with the checksums of its files: what becomes of them later, `load_tokenizer` finds out."""
    tokenizer.save(folder)
    write_checked_json(folder / CHECKSUMS, {name: _file_sha256(folder / name) for name in FILES})


def _check_kept(folder: Path) -> None:
    if (folder / CHECKSUMS).exists():
        for name, checksum in read_checked_json(folder / CHECKSUMS).items():
            if _file_sha256(folder / name) != checksum:
                raise DamagedFile(f"{folder / name} does not have the checksum of {CHECKSUMS}")


def _file_sha256(file: Path) -> str:
    with open_regular(file) as stream:
        return hashlib.sha256(stream.read()).hexdigest()


def _parse(content: str, spec: str | Path, file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing more specific, and panics where it expects no mistake
        reason = " ".join(str(error).split())
        raise DataError(f"tokenizer {str(spec)!r}: {file} is not a tokenizer: {reason}") from error


def _eos_token(tokenizer: tokenizers.Tokenizer, config: dict[str, Any], file: Path) -> str:
    token = config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        return token
    for token in COMMON_EOS:
        if tokenizer.token_to_id(token) is not None:
            return token
    raise DataError(f"tokenizer {file}: no token ends a document; name it as eos_token in tokenizer_config.json")


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level tokenizers write for each byte.

    Printable Latin-1 bytes stand for themselves, the others for the characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _sha256(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
