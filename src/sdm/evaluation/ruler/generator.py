"""Samples of RULER's tasks: any task, any length, any tokenizer, any place in the order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sdm.data.randomness import hash_of
from sdm.data.tokenization import Tokenizer
from sdm.evaluation.ruler.aggregation import CommonWords, FrequentWords
from sdm.evaluation.ruler.questions import Answering, FileQuestions, MadeQuestions, QuestionSet, read_hotpot, read_squad
from sdm.evaluation.ruler.retrieval import Needles
from sdm.evaluation.ruler.sample import Draft, NoRoom, Sample, TooShort, Window, fit
from sdm.evaluation.ruler.tasks import TASKS, text_source
from sdm.evaluation.ruler.text import Essays

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
