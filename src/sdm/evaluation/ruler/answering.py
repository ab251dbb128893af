"""Question answering among documents, most of which have nothing to do with the question."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from sdm.data.randomness import Permutation
from sdm.evaluation.ruler.questions import QuestionSet

_TASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


@dataclass(frozen=True)
class Answering:
    source: str
    """Which questions: those of SQuAD's kind, or HotpotQA's."""
    new_tokens: int = 32
    metric: str = "part"

    def draft(self, rng: random.Random, questions: QuestionSet, index: int) -> AnsweringDraft:
        return AnsweringDraft(rng, questions, index)


class AnsweringDraft:
    """The question of a number. Its units are documents beside those that it needs."""

    answer_prefix = " Answer:"

    def __init__(self, rng: random.Random, questions: QuestionSet, index: int) -> None:
        self._questions = questions
        self._asked = questions.question(index)
        self.answers = self._asked.answers
        self._needed = rng.sample(self._asked.documents, len(self._asked.documents))
        self._places = sorted(rng.random() for _ in self._needed)
        self._others: list[str] = []
        self._coming = self._in_turn(rng.getrandbits(64))

    def question(self, units: int, filler: str = "") -> str:
        documents = [self._questions.document(number) for number in self._needed]
        others = self._distractors(units)
        for number, (document, place) in enumerate(zip(documents, self._places, strict=True)):
            others.insert(int(place * (units + 1)) + number, document)
        context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(others, 1))
        return (
            f"{_TASK}\n\nThe following are given documents.\n\n{context}{filler}\n\n{_TASK}\n\n"
            f"Question: {self._asked.text}"
        )

    def filler(self, units: int) -> str:
        start = units + len(self._needed)
        coming = self._distractors(units + 2)[units:]
        return "".join(f"\n\nDocument {start + number}:\n{text}" for number, text in enumerate(coming, 1))

    def _distractors(self, count: int) -> list[str]:
        while len(self._others) < count:
            self._others.append(self._questions.document(next(self._coming)))
        return self._others[:count]

    def _in_turn(self, seed: int) -> Iterator[int]:
        """Related documents, then all others in a random order; and from the beginning again when there are no more."""
        rng, needed, related = random.Random(seed), {*self._needed}, self._asked.related
        others = self._questions.num_documents - len(needed) - len(related)
        while True:
            yield from rng.sample(related, len(related))
            if others > 0:
                order = Permutation(self._questions.num_documents, rng.getrandbits(64))
                taken = needed | {*related}
                yield from (number for number in map(order.__getitem__, range(len(order))) if number not in taken)
            elif not related:  # a file with nothing but what this question needs
                yield from self._needed
