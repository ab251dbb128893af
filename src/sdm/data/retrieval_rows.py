"""Rows of retrieval tasks in text: what is hidden, how it is asked for, and which tokens are to be predicted.

    pairs         sentences "KEY is: VALUE", then all keys again; the smallest task, that the others are learned from
    needles       one to six needles in noise or sentences, asked for one by one (RULER's single and multikey)
    multivalue    one key with several values, all asked for
    multiquery    several keys asked for in one question
    dense         needles and nothing else, a few of them asked for one by one (RULER's multikey_2)
    tracking      a chain of variable assignments, behind a worked example (RULER's vt)
    text          plain text, of which a few tokens are to be predicted

Keys are drawn from the words of a corpus, without the words of RULER's lists, and from made-up words. The phrasing is
drawn per row: RULER's own in `ruler_phrasing` of the rows, another elsewhere. Answers restate the key before the value,
so that the place of an answer looks like the place of its needle; RULER's scoring looks for the value alone.
"""

from __future__ import annotations

import itertools
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sdm.errors import DataError

LONGEST_SENTENCE = 60  # words of a sentence: what has no full stops is cut
_SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]])) (?=["'(\[]?[A-Z0-9])""")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."  # RULER's
NOISE_SENTENCES = (
    "The rain is cold.", "A bird sings.", "The road is long.", "We walk home.", "Snow is white.", "Now it begins.",
    "The sea is deep.", "Up and down again.", "The leaves are red.", "So it goes.",
)  # fmt: skip
SYLLABLES = (
    "ba", "re", "lo", "mi", "tu", "ka", "ve", "no", "shi", "dra", "pel", "gor", "fin", "wex", "zan", "qui", "thor",
    "um", "est", "ing", "ly", "ous", "ark", "ell", "on", "ed", "ight", "ow", "ash", "ert",
)  # fmt: skip
RULER_NEEDLE = "One of the special magic numbers for {key} is: {value}."
SHORT_NEEDLE = "{key} is: {value}."
NEEDLES = (
    "The secret code of {key} is: {value}.",
    "Remember that the number for {key} is: {value}.",
    SHORT_NEEDLE,
)
QUESTIONS = (
    "\nWhich number belongs to {keys}? The answer for {keys} is",
    "\nTell me the code of {keys}. The code of {keys} in the text is",
)
INTRODUCTIONS = ("Read this text.\n", "Some numbers are hidden below.\n", "")
TRACKING = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
TRACKING_QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
TRACKING_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)
DIGITS = 7
MADE_UP = 0.3  # of the words of keys
NOISE_ROWS = 0.35
KEPT_KEYS, KEPT_DIGITS = 0.8, 0.7  # rows in which restated keys, and digits after the first token, are predicted
TOKENS_PER_QUESTION, MOST_QUESTIONS = 256, 4  # of rows with needles only
ATTEMPTS = 4  # draws of a task whose rows may be too long
WORD = re.compile(r"\b[a-z]{3,9}\b")


def key_words(sentences: Sequence[str]) -> list[str]:
    """The words of sentences that keys are made of: lower case, three to nine letters, none of RULER's lists."""
    words = sorted({word for sentence in sentences for word in WORD.findall(sentence)} - {*single_words()})
    if not words:
        raise DataError("the text has no words of three to nine lower-case letters beside those of RULER's lists")
    return words


@dataclass
class Row:
    """Token ids, and whether each is to be predicted."""

    ids: list[int] = field(default_factory=list)
    predicted: list[bool] = field(default_factory=list)

    def add(self, ids: Sequence[int], predicted: bool | Sequence[bool] = False) -> None:
        """Append tokens."""
        self.ids += ids
        self.predicted += [predicted] * len(ids) if isinstance(predicted, bool) else predicted


@dataclass(frozen=True)
class Difficulty:
    """How far a curriculum has come."""

    level: float = 1.0
    """Of pairs: from short keys and values at 0 to those of the other tasks at 1."""
    easy: bool = False
    """Whether rows have few needles, and questions one key each."""


class RowMaker:
    """Draws rows from a `random.Random`; everything else about it is constant.

    Args:
        encode: Text to token ids.
        end: The token that begins a row and ends an answer.
        sentences: Text for haystacks.
        words: Words that keys are made of.
        ruler_phrasing: Share of the rows that are phrased as RULER's.
        sparse: Predict the first token of every value, and the other tokens of answers in some of the rows only.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        end: int,
        sentences: Sequence[str],
        words: Sequence[str],
        ruler_phrasing: float,
        sparse: bool,
    ) -> None:
        self._encode, self._end, self._ruler, self._sparse = encode, end, ruler_phrasing, sparse
        self._words = words
        self._sentences = [encode(f" {sentence}") for sentence in sentences]
        self._short = [word for word in words if len(encode(f" {word}")) == 1] or list(words)
        self._makers = {
            "pairs": self._pairs,
            "needles": self._needles,
            "multivalue": self._multivalue,
            "multiquery": self._multiquery,
            "dense": self._dense,
            "tracking": self._tracking,
            "text": self._text,
        }

    def row(self, rng: random.Random, task: str, length: int, difficulty: Difficulty) -> Row:
        """A row of at most `length` tokens that predicts something: of the task, or of pairs if that does not fit."""
        attempts = [(task, difficulty)] * ATTEMPTS + [("pairs", Difficulty(0.0, easy=True))] * ATTEMPTS
        for kind, hardness in attempts:
            row = Row()
            row.add([self._end])
            self._makers[kind](rng, row, length, hardness)
            # The end of a row that is too long is cut off: haystacks are filled to the length, but not exactly.
            row.ids, row.predicted = row.ids[:length], row.predicted[:length]
            if any(row.predicted):
                return row
        raise DataError(f"length = {length}: a pair of a key and its value takes more tokens; make rows longer")

    def _word(self, rng: random.Random) -> str:
        if rng.random() >= MADE_UP:
            return rng.choice(self._words)
        return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))

    def key(self, rng: random.Random) -> str:
        """Two words, none of them of RULER's lists."""
        while True:
            words = [self._word(rng), self._word(rng)]
            if not RESERVED.intersection(words):
                return "-".join(words)

    def _haystack(self, rng: random.Random, budget: int, needles: Sequence[str], noise: str | None) -> list[int]:
        """Needles, in their order, at random places in about `budget` tokens of noise or text."""
        hidden = [self._encode(needle) for needle in needles]
        budget -= sum(map(len, hidden))
        units: list[list[int]] = []
        if noise is not None:
            unit = self._encode(noise)
            units = [unit] * max(0, budget // len(unit))
        else:
            number = rng.randrange(len(self._sentences))
            while (budget := budget - len(self._sentences[number])) >= 0:
                units.append(self._sentences[number])
                number = (number + 1) % len(self._sentences)
        places = sorted(rng.randrange(len(units) + 1) for _ in hidden)
        whole: list[int] = []
        start = 0
        for needle, place in zip(hidden, places, strict=True):
            for unit in units[start:place]:
                whole += unit
            whole += needle
            start = place
        for unit in units[start:]:
            whole += unit
        return whole

    def _noise(self, rng: random.Random, ruler: bool) -> str:
        if ruler:
            return f"{NOISE}\n"
        return " ".join(rng.sample(NOISE_SENTENCES, rng.randint(2, 5))) + "\n"

    def _answer(self, rng: random.Random, row: Row, pairs: Sequence[tuple[str, str]]) -> None:
        """Restated keys with their values; the loss of a training row rests mostly on the first digits."""
        keys = not self._sparse or rng.random() < KEPT_KEYS
        digits = not self._sparse or rng.random() < KEPT_DIGITS
        for key, value in pairs:
            row.add(self._encode(f" {key} is:"), keys)
            ids = self._encode(f" {value}.")  # a space, the first digits, the others, a full stop
            row.add(ids, [keys, True, *[digits] * (len(ids) - 2)])

    def _pairs(self, rng: random.Random, row: Row, length: int, difficulty: Difficulty) -> None:
        level = difficulty.level
        short, digits = level < 1 and rng.random() < 1 - level, DIGITS
        if level < 1:
            digits = rng.choice((2, 3, 4) if level < 0.5 else (3, 5, 7))
        words = self._short if level < 0.3 else self._words
        count = rng.randint(1, 2) if level <= 0 else rng.randint(2, 3 + int(4 * level))
        if level > 0 and length >= 200:
            count = rng.randint(3, 10)
        keys = {rng.choice(words) if short else self.key(rng): None for _ in range(count)}
        pairs = [(key, number(rng, digits)) for key in keys]
        template = SHORT_NEEDLE if level < 0.4 else self._needle(rng)
        needles = [" " + template.format(key=key, value=value) for key, value in pairs]
        tail = Row()
        for key, value in rng.sample(pairs, len(pairs)):
            tail.add(self._encode(f" {key} is:"))
            ids = self._encode(f" {value}.")
            tail.add(ids, [False, True, *[True] * (len(ids) - 3), False] if len(ids) > 2 else [False, True])
        noise = " " + self._noise(rng, False).strip() if rng.random() < NOISE_ROWS else None
        budget = length - len(tail.ids) - 1 if level > 0.2 else 0
        row.add(self._haystack(rng, budget, needles, noise))
        row.add(tail.ids, tail.predicted)

    def _needle(self, rng: random.Random) -> str:
        return RULER_NEEDLE if rng.random() < self._ruler else rng.choice(NEEDLES)

    def _ask(
        self,
        rng: random.Random,
        row: Row,
        length: int,
        pairs: Sequence[tuple[str, str]],
        questions: Sequence[Sequence[str]],
        most_others: int | None = None,
    ) -> None:
        """An introduction, the pairs in a haystack, and questions, each of some keys, with their answers.

        `most_others` makes the haystack of other needles, so many at most, instead of noise or text.
        """
        ruler = rng.random() < self._ruler
        template = RULER_NEEDLE if ruler else rng.choice(NEEDLES)
        noise = self._noise(rng, ruler) if most_others is None and rng.random() < NOISE_ROWS else None
        line = " {}" if noise is None and most_others is None else "{}\n"
        needles = [line.format(template.format(key=key, value=value)) for key, value in pairs]
        several = any(len(_values(pairs, keys)) > 1 for keys in questions)
        tail, phrase = Row(), rng.choice(QUESTIONS)
        for keys in questions:
            tail.add(self._encode(ruler_question(keys, several) if ruler else phrase.format(keys=listed(keys))))
            self._answer(rng, tail, _values(pairs, keys))
            tail.add([self._end], True)
        introduction = ruler_introduction(several) if ruler else rng.choice(INTRODUCTIONS)
        row.add(self._encode(introduction))
        budget = length - len(row.ids) - len(tail.ids)
        if most_others is None:
            row.add(self._haystack(rng, budget, needles, noise))
        else:
            row.add(self._only_needles(rng, budget, dict(pairs), line.format(template), most_others))
        row.add(tail.ids, tail.predicted)

    def _only_needles(
        self, rng: random.Random, budget: int, pairs: Mapping[str, str], template: str, most_others: int
    ) -> list[int]:
        """The pairs among needles of other keys, in random order, in at most `budget` tokens."""
        needles = [self._encode(template.format(key=key, value=value)) for key, value in pairs.items()]
        budget -= sum(map(len, needles))
        others: set[str] = set()
        while len(others) < most_others:
            if (key := self.key(rng)) in pairs or key in others:
                continue
            needle = self._encode(template.format(key=key, value=number(rng)))
            if (budget := budget - len(needle)) < 0:
                break
            others.add(key)
            needles.append(needle)
        rng.shuffle(needles)
        return list(itertools.chain.from_iterable(needles))

    def _dense(self, rng: random.Random, row: Row, length: int, difficulty: Difficulty) -> None:
        asked = self._distinct(rng, min(1 + length // TOKENS_PER_QUESTION, MOST_QUESTIONS))
        most_others = rng.randint(1, 5) if difficulty.easy else length
        self._ask(rng, row, length, asked, [[key] for key, _ in asked], most_others)

    def _needles(self, rng: random.Random, row: Row, length: int, difficulty: Difficulty) -> None:
        count = rng.choice((1, 2, 3) if difficulty.easy else (1, 1, 2, 4, 4, 6))
        pairs = self._distinct(rng, count)
        asked = rng.sample(pairs, min(3, count))
        self._ask(rng, row, length, pairs, [[key] for key, _ in asked])

    def _multivalue(self, rng: random.Random, row: Row, length: int, difficulty: Difficulty) -> None:
        key, count = self.key(rng), 2 if difficulty.easy else rng.choice((2, 4, 4))
        self._ask(rng, row, length, [(key, number(rng)) for _ in range(count)], [[key]])

    def _multiquery(self, rng: random.Random, row: Row, length: int, difficulty: Difficulty) -> None:
        pairs = self._distinct(rng, 2 if difficulty.easy else rng.choice((2, 4, 4)))
        self._ask(rng, row, length, pairs, [[key for key, _ in rng.sample(pairs, len(pairs))]])

    def _distinct(self, rng: random.Random, count: int) -> list[tuple[str, str]]:
        keys: dict[str, None] = {}
        while len(keys) < count:
            keys[self.key(rng)] = None
        return [(key, number(rng)) for key in keys]

    def _chain(self, rng: random.Random, letters: int, count: int, budget: int, noise: str) -> tuple[Row, list[int]]:
        """A prompt of about `budget` tokens, and the names that answer it."""
        names: dict[str, None] = {}
        while len(names) < count:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        value, chain = number(rng, 5), list(names)
        lines = [f"VAR {chain[0]} = {value}\n"]
        lines += [f"VAR {name} = VAR {before} \n" for before, name in itertools.pairwise(chain)]
        question = TRACKING_QUESTION.format(value=value) + TRACKING_PREFIX.format(count=count, value=value)
        prompt, asked = Row(), self._encode(question)
        answer = self._encode(" ".join(chain))
        prompt.add(self._encode(TRACKING))
        prompt.add(self._haystack(rng, budget - len(prompt.ids) - len(asked) - len(answer), lines, noise))
        prompt.add(asked)
        return prompt, answer

    def _tracking(self, rng: random.Random, row: Row, length: int, difficulty: Difficulty) -> None:
        count, noise = rng.choice((2, 3) if difficulty.easy else (3, 5, 5)), self._noise(rng, rng.random() < 0.5)
        if not difficulty.easy:  # a worked example, as RULER's
            example, names = self._chain(rng, 3, count, 0, noise)
            row.add(example.ids)
            row.add(names, True)
            row.add(self._encode("\n\n"))
        letters = rng.choice((3, 5)) if difficulty.easy else 5
        prompt, names = self._chain(rng, letters, count, length - len(row.ids) - 1, noise)
        row.add(prompt.ids)
        row.add(names, True)
        row.add([self._end], True)

    def _text(self, rng: random.Random, row: Row, length: int, difficulty: Difficulty) -> None:
        ids = self._haystack(rng, length + max(map(len, self._sentences)), [], None)[: length - 1]
        chosen = {*rng.sample(range(len(ids)), min(16, len(ids)))}
        row.add(ids, [place in chosen for place in range(len(ids))])


def split_sentences(text: str) -> list[str]:
    """Cut a text into sentences without line breaks, in which every space is one space."""
    sentences = []
    for sentence in _SENTENCE_END.split(" ".join(text.split())):
        words = sentence.split()
        for start in range(0, len(words), LONGEST_SENTENCE):
            sentences.append(" ".join(words[start : start + LONGEST_SENTENCE]))
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


RESERVED = frozenset(single_words())


def number(rng: random.Random, digits: int = DIGITS) -> str:
    """A number of so many digits, the first of them not zero."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def listed(words: Sequence[str]) -> str:
    """`a`, `a, and b`, `a, b, and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, and {words[-1]}"


def ruler_introduction(several: bool) -> str:
    """The first lines of RULER's needle tasks."""
    some, verb, plural = ("Some", "are", "s") if several else ("A", "is", "")
    return (
        f"{some} special magic number{plural} {verb} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the number{plural} afterwards.\n"
    )


def ruler_question(keys: Sequence[str], several: bool) -> str:
    """The question and the beginning of the answer of RULER's needle tasks."""
    plural, asked, verb = ("s", "are all", "are") if several else ("", "is", "is")
    return (
        f"\nWhat {asked} the special magic number{plural} for {listed(keys)} mentioned in the provided text? "
        f"The special magic number{plural} for {listed(keys)} mentioned in the provided text {verb}"
    )


def _values(pairs: Sequence[tuple[str, str]], keys: Sequence[str]) -> list[tuple[str, str]]:
    return [(key, value) for asked in keys for key, value in pairs if key == asked]
