"""Questions and the documents that answer them: from SQuAD's or HotpotQA's file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from sdm.data.errors import DataError
from sdm.evaluation.ruler.json_file import plain_text, read_json_file


@dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    """Those that it cannot be answered without."""
    related: tuple[int, ...] = ()
    """Others to take first."""


class QuestionSet(Protocol):
    """Questions in an order, about documents."""

    def question(self, index: int) -> Question: ...

    def document(self, number: int) -> str: ...

    @property
    def num_questions(self) -> int: ...

    @property
    def num_documents(self) -> int: ...


class FileQuestions:
    """Everything in memory."""

    def __init__(self, questions: list[Question], documents: list[str], path: Path) -> None:
        if not questions:
            raise DataError(f"{path} has no question that can be answered")
        self._questions, self._documents, self._path = questions, documents, path
        self.num_questions, self.num_documents = len(questions), len(documents)

    @cached_property
    def fingerprint(self) -> str:
        """Of all questions and documents."""
        return hashlib.sha256(json.dumps([*map(astuple, self._questions), *self._documents]).encode()).hexdigest()

    def question(self, index: int) -> Question:
        if index >= self.num_questions:
            raise DataError(f"{self._path} has {self.num_questions} questions; take at most so many samples")
        return self._questions[index]

    def document(self, number: int) -> str:
        return self._documents[number]


def read_squad(path: Path) -> FileQuestions:
    """The questions of a file in SQuAD's format that can be answered. Paragraphs of the same article are related."""
    whole = _field(read_json_file(path), "data", list, f"{path}")
    documents: dict[str, int] = {}
    questions = []
    for number, article in enumerate(whole, 1):
        where = f"{path}, article {number}"
        paragraphs = _field(article, "paragraphs", list, where)
        texts = [_field(one, "context", str, f"{where}, paragraph {n}") for n, one in enumerate(paragraphs, 1)]
        numbers = tuple(documents.setdefault(text, len(documents)) for text in texts)
        for n, (paragraph, own) in enumerate(zip(paragraphs, numbers, strict=True), 1):
            for m, asked in enumerate(_field(paragraph, "qas", list, f"{where}, paragraph {n}"), 1):
                place = f"{where}, paragraph {n}, question {m}"
                text, answers = _field(asked, "question", str, place), _field(asked, "answers", list, place)
                if asked.get("is_impossible"):
                    continue
                found = dict.fromkeys(_field(answer, "text", str, place) for answer in answers)
                if not found:
                    raise DataError(f"{place}: it has no answer, and is_impossible does not say so")
                related = tuple(dict.fromkeys(other for other in numbers if other != own))
                questions.append(Question(text, tuple(found), (own,), related))
    return FileQuestions(questions, list(documents), path)


def read_hotpot(path: Path) -> FileQuestions:
    """The questions of a file in HotpotQA's format (distractor setting), each with all of its own paragraphs."""
    whole = read_json_file(path)
    if not isinstance(whole, list):
        raise DataError(f"{path}: expected a list of questions, got {type(whole).__name__}")
    documents: dict[str, int] = {}
    questions = []
    for number, asked in enumerate(whole, 1):
        where = f"{path}, record {number}"
        own = []
        for paragraph in _field(asked, "context", list, where):
            match paragraph:
                case [str(title), list(sentences)] if all(isinstance(sentence, str) for sentence in sentences):
                    document = plain_text(f"{title}\n{''.join(sentences)}", where)
                    own.append(documents.setdefault(document, len(documents)))
                case _:
                    raise DataError(f"{where}: expected paragraphs of the form [title, [sentence, ...]] in its context")
        text, answer = _field(asked, "question", str, where), _field(asked, "answer", str, where)
        questions.append(Question(text, (answer,), tuple(dict.fromkeys(own))))
    return FileQuestions(questions, list(documents), path)


def _field(record: Any, name: str, kind: type, where: str) -> Any:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        raise DataError(f"{where}: expected an object with {name!r}, a {kind.__name__}")
    return plain_text(value, where) if isinstance(value, str) else value
