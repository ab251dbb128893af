"""Training a byte-level BPE tokenizer."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from sdm.data.errors import DataError
from sdm.data.tokenization import END_OF_TEXT, HFTokenizer

SMALLEST_VOCABULARY = 257  # the bytes and the token between documents
# Training takes time quadratic in the longest word, so that long runs are cut into pieces of fewer than two blocks.
# Ordinary text has none: the longest word of the built-in corpora has 96 characters. Encoding does not cut.
BLOCK = 512  # characters
_SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_RUN = re.compile(rf"[^\W_]+|[{_SPACES}]+|(?:[^\w{_SPACES}]|_)+")


def train_bpe(texts: Iterable[str], vocab_size: int, progress: bool = False) -> HFTokenizer:
    """A tokenizer of `vocab_size` ids whose merges are the most frequent ones of the texts.

    Any text can be encoded, whatever it was trained on: every byte has an id. A small text may not have enough
    different words to fill the vocabulary; that is an error, because a model would be built for ids that never occur.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"vocab_size must be at least {SMALLEST_VOCABULARY}, one id per byte and one more, got {vocab_size}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
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
