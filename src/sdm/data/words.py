"""Words and sentences: RULER's key words, which no training data may use as keys, and text cut into sentences."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

LONGEST = 60  # words of a sentence: what has no full stops is cut
_SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]])) (?=["'(\[]?[A-Z0-9])""")


def split_sentences(text: str) -> list[str]:
    """Without line breaks; every space is one space."""
    sentences = []
    for sentence in _SENTENCE_END.split(" ".join(text.split())):
        words = sentence.split()
        for start in range(0, len(words), LONGEST):
            sentences.append(" ".join(words[start : start + LONGEST]))
    return sentences


@cache
def word_lists() -> dict[str, tuple[str, ...]]:
    """The words of each kind that RULER's tasks draw: adjectives, nouns and verbs."""
    kinds: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("ruler_words.txt").read_text(encoding="ascii").splitlines():
        if line.startswith("#"):
            words = kinds.setdefault(line.strip("# "), [])
        else:
            words += line.split()
    return {kind: tuple(words) for kind, words in kinds.items()}


@cache
def single_words() -> tuple[str, ...]:
    """Every word of RULER's lists, once."""
    return tuple(sorted({word for words in word_lists().values() for word in words}))
