"""RULER's needles in a haystack (niah) and variable tracking (vt): facts hidden in text."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sdm.evaluation.ruler.text import NOISE, Essays, adjective_nouns, noise_words, numbers, uuids

# Where needles are put into an essay, in percent of its sentences.
DEPTHS = tuple(round(step * 100 / 39) for step in range(40))
FILLER = 300  # characters: more than a needle has

Haystack = Literal["noise", "essay", "needles"]
_KINDS: dict[str, Callable[[random.Random, int], list[str]]] = {
    "word": adjective_nouns,
    "number": numbers,
    "uuid": uuids,
}


@dataclass(frozen=True)
class Needles:
    """What is hidden, in what, and how much of it is asked for."""

    haystack: Haystack
    key: str = "word"
    value: str = "number"
    num_keys: int = 1
    num_values: int = 1
    """Of each key."""
    num_queries: int = 1
    """Keys that are asked for."""
    new_tokens: int = 128
    metric: str = "all"

    def draft(self, rng: random.Random, essays: Essays) -> NeedleDraft:
        """Draw a sample."""
        return NeedleDraft(self, rng, essays)


class NeedleDraft:
    """One sample of a `Needles` task."""

    def __init__(self, task: Needles, rng: random.Random, essays: Essays) -> None:
        self._task, self._essays = task, essays
        keys = _KINDS[task.key](rng, task.num_keys)
        values = _KINDS[task.value](rng, task.num_keys * task.num_values)
        pairs = [(keys[number // task.num_values], value) for number, value in enumerate(values)]
        queries = rng.sample(range(task.num_keys), task.num_queries)
        start = [query * task.num_values for query in queries]
        self.answers = tuple(value for at in start for value in values[at : at + task.num_values])
        self._needles = [self._needle(key, value) for key, value in rng.sample(pairs, len(pairs))]
        self._keys = frozenset(keys)
        self._query = _listed([keys[query] for query in queries])
        self._depths = sorted(rng.sample(DEPTHS, len(pairs)))
        self._places = sorted(rng.random() for _ in pairs)
        self._distractor_seed = rng.getrandbits(64)
        self._one = len(self.answers) == 1

    @property
    def answer_prefix(self) -> str:
        """Beginning of the answer."""
        plural, verb = ("", "is") if self._one else ("s", "are")
        value = self._task.value
        return f" The special magic {value}{plural} for {self._query} mentioned in the provided text {verb}"

    def question(self, units: int, filler: str = "") -> str:
        """The prompt with so many sentences, lines or other needles."""
        value, plural = self._task.value, "" if self._one else "s"
        some, verb, asked = ("A", "is", "is") if self._one else ("Some", "are", "are all")
        return (
            f"{some} special magic {value}{plural} {verb} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {value}{plural} afterwards.\n{self.context(units, filler)}\n"
            f"What {asked} the special magic {value}{plural} for {self._query} mentioned in the provided text?"
        )

    def context(self, units: int, filler: str = "") -> str:
        """The haystack with its needles."""
        if self._task.haystack == "essay":
            parts, between = self._essays.sentences(0, units), " "
            places = [units * depth // 100 for depth in self._depths]
        else:
            parts, between = [NOISE] * units if self._task.haystack == "noise" else self._distractors(units), "\n"
            places = [int(place * (units + 1)) for place in self._places]
        parts = _inserted(parts, self._needles, places)
        return between.join([*parts, filler] if filler else parts)

    def filler(self, units: int) -> str:
        """The next sentences of the essay, or noise."""
        if self._task.haystack == "essay":
            return " ".join(self._essays.sentences(units, units + 3))
        return noise_words(FILLER)

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self._task.value}s for {key} is: {value}."

    def _distractors(self, count: int) -> list[str]:
        """Other keys than those that are hidden: the same key twice would have two answers."""
        rng = random.Random(self._distractor_seed)
        keys = _KINDS[self._task.key](rng, count + len(self._keys))
        others = [key for key in keys if key not in self._keys][:count]
        values = _KINDS[self._task.value](rng, count)
        return [self._needle(key, value) for key, value in zip(others, values, strict=True)]


def _inserted(parts: list[str], needles: list[str], places: list[int]) -> list[str]:
    """The parts with each needle before the part of its place; places are in order."""
    whole: list[str] = []
    start = 0
    for needle, place in zip(needles, places, strict=True):
        whole += parts[start:place]
        whole.append(needle)
        start = place
    return whole + parts[start:]


def _listed(words: list[str]) -> str:
    """`a`, `a, and b`, `a, b, and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, and {words[-1]}"


DIGITS = 5  # of a value
LETTERS = 5  # of a variable's name
EXAMPLE_LETTERS, EXAMPLE_LINES = 3, 5  # of the worked example


@dataclass(frozen=True)
class Variables:
    """One chain; each hop assigns the variable before to a new one."""

    num_hops: int = 4
    new_tokens: int = 30
    metric: str = "all"

    def draft(self, rng: random.Random) -> VariableDraft:
        """Draw a sample."""
        return VariableDraft(self, rng)


class VariableDraft:
    """One sample, behind a worked example."""

    def __init__(self, task: Variables, rng: random.Random) -> None:
        count = task.num_hops + 1
        own, shown = numbers(rng, 2, DIGITS)
        names = _names(rng, EXAMPLE_LETTERS, count)
        lines = _hidden(_chain(names, shown), EXAMPLE_LINES, [rng.random() for _ in names])
        self._example = _question("\n".join(lines), shown) + _prefix(count, shown) + f" {' '.join(names)}\n\n"
        self.answers = tuple(_names(rng, LETTERS, count))
        self.answer_prefix = _prefix(count, own)
        self._value = own
        self._places = [rng.random() for _ in self.answers]

    def question(self, units: int, filler: str = "") -> str:
        """The prompt with so many lines of noise, behind the worked example."""
        lines = _hidden(_chain(self.answers, self._value), units, self._places)
        return self._example + _question("\n".join([*lines, filler] if filler else lines), self._value)

    def filler(self, units: int) -> str:
        """More noise."""
        return noise_words(2 * len(NOISE))


def _names(rng: random.Random, letters: int, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    return list(names)


def _chain(names: list[str] | tuple[str, ...], value: str) -> list[str]:
    """A line per variable. RULER's lines of hops end in a space."""
    hops = [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(names)]
    return [f"VAR {names[0]} = {value}", *hops]


def _hidden(chain: list[str], lines: int, places: list[float]) -> list[str]:
    """The chain, in its order, between lines of noise."""
    whole = [NOISE] * lines
    for number, (line, place) in enumerate(zip(chain, sorted(places), strict=True)):
        whole.insert(int(place * (lines + 1)) + number, line)
    return whole


def _question(context: str, value: str) -> str:
    return (
        f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
        f"Question: Find all variables that are assigned the value {value} in the text above."
    )


def _prefix(count: int, value: str) -> str:
    return (
        f" Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned "
        f"the value {value}, they are: "
    )
