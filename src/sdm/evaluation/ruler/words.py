"""The words that tasks are made of, from lists of this project's own: words.txt."""

from __future__ import annotations

import random
import uuid
from functools import cache
from pathlib import Path

SHORT = 4  # letters of the nouns that compounds are made of, at most


@cache
def word_lists() -> dict[str, tuple[str, ...]]:
    """The words of each kind: adjectives, nouns and verbs."""
    kinds: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("words.txt").read_text(encoding="ascii").splitlines():
        if line.startswith("#"):
            words = kinds.setdefault(line.strip("# "), [])
        else:
            words += line.split()
    return {kind: tuple(words) for kind, words in kinds.items()}


@cache
def single_words() -> tuple[str, ...]:
    """Every word of the lists, once."""
    return tuple(sorted({word for words in word_lists().values() for word in words}))


@cache
def compounds() -> tuple[str, ...]:
    """Two short nouns in one word, such as "owlgate", for lists that need more words than there are."""
    nouns = [noun for noun in word_lists()["nouns"] if len(noun) <= SHORT]
    return tuple(sorted({first + second for first in nouns for second in nouns} - {*single_words()}))


def adjective_nouns(rng: random.Random, count: int) -> list[str]:
    """Distinct keys such as "brave-otter"."""
    adjectives, nouns = word_lists()["adjectives"], word_lists()["nouns"]
    drawn = (divmod(number, len(nouns)) for number in rng.sample(range(len(adjectives) * len(nouns)), count))
    return [f"{adjectives[adjective]}-{nouns[noun]}" for adjective, noun in drawn]


def numbers(rng: random.Random, count: int, digits: int = 7) -> list[str]:
    """Distinct numbers of so many digits."""
    return [str(number) for number in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


def uuids(rng: random.Random, count: int) -> list[str]:
    """Random (version 4) uuids, distinct but for a chance of nothing."""
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]
