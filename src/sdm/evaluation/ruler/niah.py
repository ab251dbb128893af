"""Needles in a haystack: keys with values, hidden in text or among other needles, and asked for by key."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sdm.evaluation.ruler.haystack import NOISE, Essays, noise_words
from sdm.evaluation.ruler.words import adjective_nouns, numbers, uuids

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
        plural, verb = ("", "is") if self._one else ("s", "are")
        value = self._task.value
        return f" The special magic {value}{plural} for {self._query} mentioned in the provided text {verb}"

    def question(self, units: int, filler: str = "") -> str:
        value, plural = self._task.value, "" if self._one else "s"
        some, verb, asked = ("A", "is", "is") if self._one else ("Some", "are", "are all")
        return (
            f"{some} special magic {value}{plural} {verb} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {value}{plural} afterwards.\n{self.context(units, filler)}\n"
            f"What {asked} the special magic {value}{plural} for {self._query} mentioned in the provided text?"
        )

    def context(self, units: int, filler: str = "") -> str:
        if self._task.haystack == "essay":
            parts, between = self._essays.sentences(0, units), " "
            places = [units * depth // 100 for depth in self._depths]
        else:
            parts, between = [NOISE] * units if self._task.haystack == "noise" else self._distractors(units), "\n"
            places = [int(place * (units + 1)) for place in self._places]
        parts = _inserted(parts, self._needles, places)
        return between.join([*parts, filler] if filler else parts)

    def filler(self, units: int) -> str:
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
