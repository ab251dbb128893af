"""Samples of RULER's tasks: prompts of a wanted length with the answers that they ask for, and RULER's metrics.

Every length is that of the whole prompt, counted by the tokenizer itself: tokens of pieces do not add up, because the
ends of pieces merge. The search for the amount of haystack is a discrete intermediate-value argument and needs no
monotony: it keeps one amount that is too little and one that is too much, and halves what is between them until one
fits or they are neighbours.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from sdm.data.randomness import hash_of
from sdm.data.tokenization import Tokenizer
from sdm.errors import UserError
from sdm.evaluation.ruler.questions import (
    Answering,
    Essays,
    FileQuestions,
    MadeQuestions,
    QuestionSet,
    read_hotpot,
    read_squad,
)
from sdm.evaluation.ruler.tasks import TASKS, CommonWords, FrequentWords, Needles, text_source


@dataclass(frozen=True)
class Sample:
    """One question about one context."""

    task: str
    length: int
    """Tokens that the prompt and the answer may take together."""
    index: int
    question: str
    """The prompt up to where the answer begins."""
    answer_prefix: str
    """The beginning of the answer, given to the model so that it goes on with what is scored."""
    answers: tuple[str, ...]
    """What the metric looks for."""
    prompt_tokens: int
    new_tokens: int
    """Tokens that the model may generate."""

    @property
    def prompt(self) -> str:
        """Everything that the model reads."""
        return self.question + self.answer_prefix

    def record(self) -> dict[str, Any]:
        """A line of JSON with the names that RULER's own files have, and this sample's place."""
        return {
            "task": self.task,
            "max_length": self.length,
            "index": self.index,
            "input": self.question,
            "answer_prefix": self.answer_prefix,
            "outputs": list(self.answers),
            "length": self.prompt_tokens + self.new_tokens,
            "tokens_to_generate": self.new_tokens,
        }


class Draft(Protocol):
    """A sample before its length is known: everything is drawn but how much haystack there is.

    The same draft gives the same prompt for the same amount, whatever was asked before.
    """

    @property
    def answers(self) -> tuple[str, ...]:
        """What the metric looks for."""

    @property
    def answer_prefix(self) -> str:
        """Beginning of the answer."""

    def question(self, units: int, filler: str = "") -> str:
        """With so many units of haystack (sentences, needles, list entries, documents), from zero on, and a piece
        of the filler behind them."""

    def filler(self, units: int) -> str:
        """Text that may follow so many units and can be cut anywhere. It is longer than the next unit."""


class TooShort(UserError):
    """A length does not hold a task, however small its haystack."""

    def __init__(self, task: str, length: int, smallest: int) -> None:
        super().__init__(f"{task} does not fit into {length} tokens: with this tokenizer it takes at least {smallest}")
        self.task, self.length, self.smallest = task, length, smallest


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
        """The window of prompts for a length that includes the answer."""
        return Window(math.ceil((1 - SLACK) * length) - new_tokens, length - new_tokens)

    @property
    def middle(self) -> float:
        """The number of tokens that the search aims at."""
        return (self.low + self.high) / 2

    def __contains__(self, tokens: int) -> bool:
        return self.low <= tokens <= self.high


@dataclass(frozen=True)
class Fitted:
    """A draft with an amount of haystack."""

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


_UNPRINTABLE = re.compile(r"[\x00-\x1f]")


def score(metric: str, output: str, answers: Sequence[str]) -> float:
    """all: the share of the answers that are found; part: 1 if any is."""
    text = _UNPRINTABLE.sub("\n", output).strip().lower()
    present = [answer.lower() in text for answer in answers]
    return float(any(present)) if metric == "part" else sum(present) / len(present)


VERSION = 2  # changes when the same seed gives other samples
BUILT_IN = ("text", "code")  # corpora that can stand for essays
FEW, FAR = 8, 4  # samples that tell how many tokens all need, if the length is so many times that


@dataclass(frozen=True)
class Sources:
    """Where the text of tasks comes from. RULER's own cannot be shipped."""

    essays: str = "text"
    """The haystack: a file or folder of texts, RULER's PaulGrahamEssays.json, or a built-in corpus (text, code)."""
    squad: Path | None = None
    """SQuAD 2.0's file of the development set; None makes questions from templates."""
    hotpot: Path | None = None
    """HotpotQA's file of the development set (distractor setting); None makes questions from templates."""


class Generator:
    """Makes samples for one tokenizer.

    The seed, a task and an index decide what is asked; the length and the tokenizer decide how much haystack there is.
    So the same index asks the same at every length, and a sample does not depend on what was made before.
    """

    def __init__(self, count: Callable[[str], int], seed: int = 42, sources: Sources | None = None) -> None:
        """count: the tokens of a whole prompt, with whatever stands before it."""
        self._count, self._seed, self._sources = count, seed, sources or Sources()
        self._guesses: dict[tuple[str, int], int] = {}
        self._questions: dict[str, QuestionSet] = {}

    def sample(self, task: str, length: int, index: int) -> Sample:
        """Raises TooShort where the length does not hold the task."""
        spec = TASKS[task]
        window = Window.of(length, spec.new_tokens)
        draft = self._draft(task, length, index)
        try:
            fitted = fit(draft, self._count, window, self._guess(task, length, window))
        except NoRoom as error:
            raise TooShort(task, length, error.tokens + spec.new_tokens) from error
        return Sample(
            task, length, index, fitted.question, draft.answer_prefix, draft.answers, fitted.tokens, spec.new_tokens
        )

    def samples(self, task: str, length: int, count: int) -> Iterator[Sample]:
        """The first `count` samples of a task at a length."""
        return (self.sample(task, length, index) for index in range(count))

    def smallest_length(self, task: str, length: int, count: int) -> int:
        """The length that holds the first so many samples of a length without any haystack, or some of them where that
        is far below the length."""
        spec, tokens = TASKS[task], 0
        varied = isinstance(spec, Answering) and isinstance(self._question_set(spec.source), FileQuestions)
        for index in range(count):
            draft = self._draft(task, length, index)
            tokens = max(tokens, self._count(draft.question(0) + draft.answer_prefix))
            if index >= FEW and not varied and FAR * (tokens + spec.new_tokens) < length:
                break
        return tokens + spec.new_tokens

    def manifest(self, tasks: Iterable[str]) -> dict[str, Any]:
        """What the samples of tasks are made of: results on other text are others."""
        fingerprints: dict[str, Any] = {"generator": VERSION}
        for kind in dict.fromkeys(map(text_source, tasks)):
            match kind:
                case "essays":
                    fingerprints[kind] = self._essays.fingerprint
                case "squad" | "hotpot":
                    fingerprints[kind] = getattr(self._question_set(kind), "fingerprint", "templates")
        return fingerprints

    def _draft(self, name: str, length: int, index: int) -> Draft:
        task = TASKS[name]
        rng = random.Random(hash_of("ruler", self._seed, name, index))
        match task:
            case Needles():
                return task.draft(rng, self._essays)
            case CommonWords():
                return task.draft(rng, length, self._count)
            case FrequentWords():
                return task.draft(rng, length)
            case Answering():
                return task.draft(rng, self._question_set(task.source), max(index, 0))
            case _:
                return task.draft(rng)

    def _guess(self, task: str, length: int, window: Window) -> int | None:
        """About how much haystack samples of this kind need: as much as a sample that nobody asks for."""
        if (task, length) not in self._guesses:
            try:
                self._guesses[task, length] = fit(self._draft(task, length, -1), self._count, window).units
            except NoRoom:
                self._guesses[task, length] = 0
        return self._guesses[task, length]

    @cached_property
    def _essays(self) -> Essays:
        return Essays(self._sources.essays)

    def _question_set(self, kind: str) -> QuestionSet:
        if kind not in self._questions:
            path = self._sources.squad if kind == "squad" else self._sources.hotpot
            if path is None:
                self._questions[kind] = MadeQuestions(1 if kind == "squad" else 2, self._seed)
            else:
                self._questions[kind] = (read_squad if kind == "squad" else read_hotpot)(path)
        return self._questions[kind]


def counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """Counts a prompt's tokens with the one that stands before a document."""
    return lambda text: 1 + len(tokenizer.encode_batch([text])[0])
