"""Frequent words: coded words whose counts fall as Zipf's law, the most frequent of them hidden behind dots."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass
from itertools import count, takewhile

LETTERS = 6
ASKED = 3  # words
ZIPF = 2.0  # the exponent
ZETA = math.pi**2 / 6  # of the exponent: the sum of all shares
TOKENS_PER_WORD = 50  # of the vocabulary
DOTS = "..."
FILLER = 400  # characters: more than the next unambiguous number of words adds


@dataclass(frozen=True)
class FrequentWords:
    new_tokens: int = 50
    metric: str = "all"

    def draft(self, rng: random.Random, length: int) -> FrequentWordsDraft:
        return FrequentWordsDraft(rng, length)


class FrequentWordsDraft:
    """One sample. Its units are words of which the law gives each rank its share, from the fewest that do."""

    answer_prefix = " Answer: According to the coded text above, the three most frequently appeared words are:"

    def __init__(self, rng: random.Random, length: int) -> None:
        size = max(ASKED + 2, length // TOKENS_PER_WORD)
        vocabulary: dict[str, None] = {}
        while len(vocabulary) < size - 1:
            vocabulary["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
        self._vocabulary = [DOTS, *vocabulary]
        self.answers = tuple(self._vocabulary[1 : ASKED + 1])
        self._seed = rng.getrandbits(64)

    def question(self, units: int, filler: str = "") -> str:
        times = counts(self._words(units))
        words = [word for word, often in zip(self._vocabulary, times, strict=False) for _ in range(often)]
        random.Random(self._seed).shuffle(words)
        return (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(words)}{filler}\nQuestion: Do not provide any explanation. Please ignore "
            "the dots '....'. What are the three most frequently appeared words in the above coded text?"
        )

    def filler(self, units: int) -> str:
        """More dots: of all words, only their number does not matter."""
        return f" {DOTS}" * (FILLER // (len(DOTS) + 1))

    @staticmethod
    def _words(units: int) -> int:
        """The largest number of words up to this where the last word asked for is more frequent than the next."""
        return next(words for words in range(SMALLEST + units, 0, -1) if _clear(words))


def counts(words: int) -> list[int]:
    """How often each rank appears among so many words, rounded down, as long as it does."""
    return list(takewhile(bool, (int(words / (rank**ZIPF * ZETA)) for rank in count(1))))


def _clear(words: int) -> bool:
    last, after = (int(words / (rank**ZIPF * ZETA)) for rank in (ASKED + 1, ASKED + 2))
    return last > after


SMALLEST = next(words for words in count(1) if _clear(words))
