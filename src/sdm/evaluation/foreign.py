"""Tokenizers that are not of this library: loaded from a folder, without a hub and without its code."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import tokenizers
import torch
from torch import Tensor

from sdm.data.tokenization import HFTokenizer, Tokenizer
from sdm.errors import UserError
from sdm.files import explained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a file of a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def open_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of any model that transformers loads.

    Its `eos_id`, the token before every document, is the token that begins a text (bos) where there is one, else the
    token that ends it.
    """
    from transformers import AutoTokenizer

    with explained(f"cannot load the tokenizer in {folder}"):
        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    start = loaded.bos_token or loaded.eos_token
    if start is None:
        raise UserError(
            f"the tokenizer in {folder} has no token that stands before a document; name one as bos_token or eos_token "
            "in tokenizer_config.json"
        )
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        return PythonTokenizer(loaded, start)
    return HFTokenizer(tokenizers.Tokenizer.from_str(backend.to_str()), str(start))


class PythonTokenizer:
    """A tokenizer of transformers that is not made by the `tokenizers` library, as a `Tokenizer`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, start: str) -> None:
        self._tokenizer = tokenizer
        self.eos_id = cast(int, tokenizer.convert_tokens_to_ids(start))

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of the class, the vocabulary and the start token."""
        parts = [type(self._tokenizer).__name__, str(sorted(self._tokenizer.get_vocab().items())), str(self.eos_id)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; names of special tokens are text."""
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode_batch(self, texts: Sequence[str]) -> list[Tensor]:
        """Token ids of several texts, as int32 tensors."""
        return [torch.tensor(self.encode(text), dtype=torch.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files."""
        self._tokenizer.save_pretrained(folder)
