"""RULER's common words (cwe) and frequent words (fwe): find the most frequent words of a list."""

from __future__ import annotations

import itertools
import math
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from sdm.data.randomness import Permutation
from sdm.data.retrieval_rows import single_words
from sdm.errors import UserError
from sdm.evaluation.ruler.text import compounds

COMMON = 10
# Below so many tokens, words appear less often, so that the list still has many.
SHORT_LENGTH = 4096
TOKENS_PER_WORD = 15  # of the list, three times with its numbers, about: says from when on the list needs compounds
REDRAWS = 100


@dataclass(frozen=True)
class Form:
    """How often words appear, and in the worked example."""

    common: int
    others: int
    example_words: int
    example_common: int
    example_others: int


LONG = Form(common=30, others=3, example_words=40, example_common=10, example_others=3)
SHORT = Form(common=6, others=1, example_words=20, example_common=3, example_others=1)


@dataclass(frozen=True)
class CommonWords:
    """The task cwe."""

    new_tokens: int = 120
    metric: str = "all"

    def draft(self, rng: random.Random, length: int, count: Callable[[str], int]) -> CommonWordsDraft:
        """In the long form if it is due and fits, else in the short one."""
        seed = rng.getrandbits(64)
        if length >= SHORT_LENGTH:
            draft = CommonWordsDraft(LONG, self.new_tokens, seed, length, count)
            if count(draft.question(0) + draft.answer_prefix) + self.new_tokens <= length:
                return draft
        return CommonWordsDraft(SHORT, self.new_tokens, seed, length, count)


class CommonWordsDraft:
    """One sample, behind a worked example. Its units are the entries of words that are not common."""

    answer_prefix = " Answer: The top 10 words that appear most often in the list are:"

    def __init__(self, form: Form, new_tokens: int, seed: int, length: int, count: Callable[[str], int]) -> None:
        self._form = form
        rng = random.Random(seed)
        singles = rng.sample(single_words(), len(single_words()))
        self._example = self._worked_example(singles[: form.example_words], rng)
        singles = singles[form.example_words :]
        # The common words are of the kinds that the others are of, or they could be told by their looks.
        share = min(1.0, TOKENS_PER_WORD * len(singles) / length)
        for _ in range(REDRAWS):
            kinds = [singles if rng.random() < share else compounds() for _ in range(COMMON)]
            common = [rng.choice(kind) for kind in kinds]
            # An answer must fit into the tokens that may be generated.
            if len({*common}) == COMMON and count(" " + _numbered(common)) <= new_tokens:
                break
        else:
            common = sorted(singles, key=len)[:COMMON]
        self.answers = tuple(common)
        self._others = [word for word in singles if word not in self.answers]
        self._more = Permutation(len(compounds()), rng.getrandbits(64))
        self._order = rng.getrandbits(64)

    def question(self, units: int, filler: str = "") -> str:
        """The prompt with so many entries of other words."""
        entries = [word for word in self.answers for _ in range(self._form.common)]
        entries += [self._other(number) for number in range(units)]
        random.Random(self._order).shuffle(entries)
        return self._example + _question(_numbered(entries) + filler)

    def filler(self, units: int) -> str:
        """The next entries of the list."""
        start = COMMON * self._form.common + units
        return "".join(f" {start + number + 1}. {self._other(units + number)}" for number in range(3))

    def _other(self, entry: int) -> str:
        """The word of an entry: the same for as many entries as it appears times."""
        number, singles = entry // self._form.others, len(single_words())
        while number >= len(self._others):
            if len(self._others) >= len(self._more):
                raise UserError(f"cwe: there are no more than {singles + len(self._more)} words; take a shorter length")
            start = len(self._others)
            words = (compounds()[self._more[place]] for place in range(start, min(2 * start, len(self._more))))
            self._others += [word for word in words if word not in self.answers]
        return self._others[number]

    def _worked_example(self, words: list[str], rng: random.Random) -> str:
        common, others = words[:COMMON], words[COMMON:]
        entries = common * self._form.example_common + others * self._form.example_others
        rng.shuffle(entries)
        return f"{_question(_numbered(entries))}{self.answer_prefix} {_numbered(common)}\n"


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _question(context: str) -> str:
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
    )


LETTERS = 6
ASKED = 3  # words
ZIPF = 2.0  # the exponent
ZETA = math.pi**2 / 6  # of the exponent: the sum of all shares
TOKENS_PER_CODED_WORD = 50  # of the vocabulary
DOTS = "..."
FILLER = 400  # characters: more than the next unambiguous number of words adds


@dataclass(frozen=True)
class FrequentWords:
    """The task fwe."""

    new_tokens: int = 50
    metric: str = "all"

    def draft(self, rng: random.Random, length: int) -> FrequentWordsDraft:
        """Draw a sample."""
        return FrequentWordsDraft(rng, length)


class FrequentWordsDraft:
    """One sample. Its units are words of which the law gives each rank its share, from the fewest that do."""

    answer_prefix = " Answer: According to the coded text above, the three most frequently appeared words are:"

    def __init__(self, rng: random.Random, length: int) -> None:
        size = max(ASKED + 2, length // TOKENS_PER_CODED_WORD)
        vocabulary: dict[str, None] = {}
        while len(vocabulary) < size - 1:
            vocabulary["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
        self._vocabulary = [DOTS, *vocabulary]
        self.answers = tuple(self._vocabulary[1 : ASKED + 1])
        self._seed = rng.getrandbits(64)

    def question(self, units: int, filler: str = "") -> str:
        """The prompt with about so many coded words."""
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
    return list(takewhile(bool, (int(words / (rank**ZIPF * ZETA)) for rank in itertools.count(1))))


def _clear(words: int) -> bool:
    last, after = (int(words / (rank**ZIPF * ZETA)) for rank in (ASKED + 1, ASKED + 2))
    return last > after


SMALLEST = next(words for words in itertools.count(1) if _clear(words))
