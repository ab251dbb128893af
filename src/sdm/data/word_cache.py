"""Byte-level BPE by looking words up.

The words that the tokenizer cuts a text into are encoded independently and repeat a lot: cutting with Python's regular
expressions and encoding each word once takes a quarter of the time that the library takes for the whole text.
"""

from __future__ import annotations

import json
import re
import sys
from array import array

import tokenizers
import torch
from torch import Tensor

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
