"""Variable tracking: a chain of assignments, hidden in text; the question is which variables have a value."""

from __future__ import annotations

import itertools
import random
import string
from dataclasses import dataclass

from sdm.evaluation.ruler.haystack import NOISE, noise_words
from sdm.evaluation.ruler.words import numbers

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
        return VariableDraft(self, rng)


class VariableDraft:
    """One sample, behind a worked example."""

    def __init__(self, task: Variables, rng: random.Random) -> None:
        count = task.num_hops + 1
        own, shown = numbers(rng, 2, DIGITS)
        names = _names(rng, EXAMPLE_LETTERS, count)
        lines = _hidden(_chain(names, shown), EXAMPLE_LINES, [rng.random() for _ in names])
        self._example = _question("\n".join(lines), shown) + _prefix(count, shown) + " ".join(names) + "\n\n"
        self.answers = tuple(_names(rng, LETTERS, count))
        self.answer_prefix = _prefix(count, own)
        self._value = own
        self._places = [rng.random() for _ in self.answers]

    def question(self, units: int, filler: str = "") -> str:
        lines = _hidden(_chain(self.answers, self._value), units, self._places)
        return self._example + _question("\n".join([*lines, filler] if filler else lines), self._value)

    def filler(self, units: int) -> str:
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
