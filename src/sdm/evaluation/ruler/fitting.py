"""How much haystack makes a prompt as long as it should be.

Every length is that of the whole prompt, counted by the tokenizer itself: tokens of pieces do not add up, because the
ends of pieces merge. The search is a discrete intermediate-value argument and needs no monotony: it keeps one amount
that is too little and one that is too much, and halves what is between them until one fits or they are neighbours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from sdm.evaluation.ruler.sample import Draft

SLACK = 0.01  # of the length: how much shorter than the limit a sample may be
PROBE = 16  # units that tell how many tokens a unit takes
GROWTH = 64  # times more units than in the last try, at most
TURNS = 200  # halving a million units takes 20, a third of them halve
_WORD_ENDS = re.compile(r"(?<=\S)(?!\S)")

Count = Callable[[str], int]


@dataclass(frozen=True)
class Window:
    """The numbers of prompt tokens that are right."""

    low: int
    high: int

    @staticmethod
    def of(length: int, new_tokens: int) -> Window:
        return Window(math.ceil((1 - SLACK) * length) - new_tokens, length - new_tokens)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def __contains__(self, tokens: int) -> bool:
        return self.low <= tokens <= self.high


@dataclass(frozen=True)
class Fitted:
    question: str
    tokens: int
    units: int


class NoRoom(Exception):
    """Even without any haystack, the prompt takes more tokens than there may be."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"{tokens} tokens")
        self.tokens = tokens


def fit(draft: Draft, count: Count, window: Window, guess: int | None = None) -> Fitted:
    """The draft with a number of tokens inside the window.

    Whole units are tried first, from `guess` on; where two neighbouring amounts lie on both sides of the window, the
    rest is filled with words, and where one more word is too much, with a part of it. Should a single character jump
    over the window, which takes more tokens for it than the window has, the shorter prompt is taken: it is never too
    long.
    """
    tried: dict[tuple[int, str], Fitted] = {}

    def at(units: int, filler: str = "") -> Fitted:
        if (units, filler) not in tried:
            question = draft.question(units, filler)
            tried[units, filler] = Fitted(question, count(question + draft.answer_prefix), units)
        return tried[units, filler]

    best = _search_units(at, window, guess)
    if best.tokens in window:
        return best
    units, filler = best.units, draft.filler(best.units)
    ends = [match.end() for match in _WORD_ENDS.finditer(filler)]
    best, end = _halve(lambda end: at(units, filler[:end]), [0, *ends], window)
    if best.tokens not in window:
        after = next((later for later in ends if later > end), end)
        best, _ = _halve(lambda end: at(units, filler[:end]), list(range(end, after)), window)
    return best


def _search_units(at: Callable[[int], Fitted], window: Window, guess: int | None) -> Fitted:
    """Inside the window, or the last amount that is too short before one that is too long."""
    high: Fitted | None = None
    low: Fitted | None = None
    if guess:
        now = at(guess)
        if now.tokens in window:
            return now
        low, high = (now, None) if now.tokens < window.low else (None, now)
    none = at(0)
    if none.tokens > window.high:
        raise NoRoom(none.tokens)
    low = low or none
    for turn in range(TURNS):
        if low.tokens in window or (high is not None and high.units - low.units == 1):
            return low
        if high is None:
            rate = (low.tokens - none.tokens) / low.units if low.units else 0.0
            step = (window.middle - low.tokens) / rate if rate > 0 else PROBE
            units = low.units + min(max(1, round(step)), GROWTH * (low.units + PROBE))
        elif turn % 3 == 2:  # halving bounds the search where tokens per unit differ much
            units = (low.units + high.units) // 2
        else:
            share = (window.middle - low.tokens) / (high.tokens - low.tokens)
            units = low.units + round(share * (high.units - low.units))
            units = min(max(units, low.units + 1), high.units - 1)
        now = at(units)
        low, high = (low, now) if now.tokens > window.high else (now, high)
    raise ValueError(f"{low.units} units of haystack take {low.tokens} tokens: the tokenizer drops text")


def _halve(at: Callable[[int], Fitted], ends: list[int], window: Window) -> tuple[Fitted, int]:
    """Inside the window, or the last that is too short, with where it ends; the first of `ends` is too short."""
    low, high = 0, len(ends)
    while high - low > 1:
        middle = (low + high) // 2
        now = at(ends[middle])
        if now.tokens in window:
            return now, ends[middle]
        low, high = (middle, high) if now.tokens < window.low else (low, middle)
    return at(ends[low]), ends[low]
