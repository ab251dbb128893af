"""RULER's question answering (qa_1, qa_2): questions among documents, most of which have nothing to do with them.

Questions and documents come from SQuAD's or HotpotQA's file, or are made from templates. The text of the other tasks is
here too: noise and essays to hide needles in, and word lists.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

from sdm.data.randomness import Permutation, hash_of
from sdm.data.retrieval_rows import single_words, split_sentences, word_lists
from sdm.data.sources import open_source
from sdm.errors import DataError
from sdm.files import Json, open_regular


@dataclass(frozen=True)
class Question:
    """A question with its answers and documents."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    """Those that it cannot be answered without."""
    related: tuple[int, ...] = ()
    """Others to take first."""


class QuestionSet(Protocol):
    """Questions in an order, about documents."""

    def question(self, index: int) -> Question:
        """Return the question of a number."""

    def document(self, number: int) -> str:
        """Return the text of a document."""

    @property
    def num_questions(self) -> int:
        """Number of questions."""

    @property
    def num_documents(self) -> int:
        """Number of documents."""


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
        """Return the question of a number."""
        if index >= self.num_questions:
            raise DataError(f"{self._path} has {self.num_questions} questions; take at most so many samples")
        return self._questions[index]

    def document(self, number: int) -> str:
        """Return the text of a document."""
        return self._documents[number]


def read_squad(path: Path) -> FileQuestions:
    """The questions of a file in SQuAD's format that can be answered. Paragraphs of the same article are related."""
    whole = _field(read_json_file(path), "data", list, f"{path}")
    documents: dict[str, int] = {}
    questions = []
    for number, article in enumerate(whole, 1):
        where = f"{path}, article {number}"
        paragraphs = _field(article, "paragraphs", list, where)
        texts = [
            _field(paragraph, "context", str, f"{where}, paragraph {n}") for n, paragraph in enumerate(paragraphs, 1)
        ]
        numbers = tuple(documents.setdefault(text, len(documents)) for text in texts)
        for n, (paragraph, own) in enumerate(zip(paragraphs, numbers, strict=True), 1):
            for m, asked in enumerate(_field(paragraph, "qas", list, f"{where}, paragraph {n}"), 1):
                place = f"{where}, paragraph {n}, question {m}"
                text, answers = _field(asked, "question", str, place), _field(asked, "answers", list, place)
                if asked.get("is_impossible"):
                    continue
                accepted = dict.fromkeys(_field(answer, "text", str, place) for answer in answers)
                if not accepted:
                    raise DataError(f"{place}: it has no answer, and is_impossible does not say so")
                related = tuple(dict.fromkeys(other for other in numbers if other != own))
                questions.append(Question(text, tuple(accepted), (own,), related))
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


def _field(record: Json, name: str, kind: type, where: str) -> Any:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        raise DataError(f"{where}: expected an object with {name!r}, a {kind.__name__}")
    return plain_text(value, where) if isinstance(value, str) else value


_BUILDINGS = ("museum", "library", "theatre", "observatory", "school", "hospital", "bakery", "brewery", "lighthouse")
_TRADES = ("baker", "weaver", "sailor", "teacher", "painter", "farmer", "doctor", "miller", "printer", "tailor")
_STARTS = ("Al", "Bel", "Cor", "Dar", "El", "Fen", "Gal", "Har", "Is", "Jor", "Kel", "Lor", "Mar", "Nor", "Or", "Per")
_MIDDLES = ("a", "an", "ar", "e", "en", "i", "in", "o", "on", "u")
_NAME_ENDS = ("bert", "dan", "dor", "fred", "lia", "lin", "mar", "mund", "na", "ric", "sa", "ton", "vin", "wen")
_TOWN_ENDS = ("bridge", "bury", "dale", "field", "ford", "ham", "holm", "mouth", "port", "stead", "wick", "worth")


def _name(number: int, ends: Sequence[str]) -> str:
    number, end = divmod(number, len(ends))
    start, middle = divmod(number, len(_MIDDLES))
    return f"{_STARTS[start]}{_MIDDLES[middle]}{ends[end]}"


_FIRST, _TOWNS = len(_STARTS) * len(_MIDDLES) * len(_NAME_ENDS), len(_STARTS) * len(_MIDDLES) * len(_TOWN_ENDS)


class MadeQuestions:
    """Questions from templates, of one hop or two, about as many made-up documents as a sample needs.

    Document 2k is about the k-th building, document 2k + 1 about its founder. One hop asks for the founder, two for the
    town where the founder was born. Every person and every building has one document, so every question one answer.
    """

    num_questions, num_documents = 2**31, 2**21

    def __init__(self, hops: int, seed: int) -> None:
        self.hops, self._seed = hops, seed

    def question(self, index: int) -> Question:
        """Make the question of a number."""
        rng = random.Random(hash_of("made question", self._seed, index))
        pair = rng.randrange(self.num_documents // 2)
        building, founder, _, born = self._facts(pair)
        if self.hops == 1:
            return Question(f"Who founded {building}?", (founder,), (2 * pair,))
        asked = f"In which town was the founder of {building} born?"
        return Question(asked, (born,), (2 * pair, 2 * pair + 1))

    def document(self, number: int) -> str:
        """Make the document of a number."""
        pair, about_person = divmod(number, 2)
        building, founder, town, born = self._facts(pair)
        rng = random.Random(hash_of("made document", self._seed, number))
        adjectives, nouns = word_lists()["adjectives"], word_lists()["nouns"]
        year, trade = rng.randrange(1650, 1900), rng.choice(_TRADES)
        if about_person:
            facts = [
                f"{founder} was a {trade} who was born in {born} in {year}.",
                f"In {year + rng.randrange(20, 50)} {founder} moved to {town} and bought a {rng.choice(nouns)} there.",
            ]
            title = founder
        else:
            facts = [
                f"{_capital(building)} was founded by {founder} in {year + 40}.",
                f"It stands beside the {rng.choice(adjectives)} {rng.choice(nouns)} of {town}.",
            ]
            title = _capital(building)
        for _ in range(rng.randrange(4, 12)):
            facts.append(
                f"{rng.choice(('Visitors', 'Neighbours', 'Travellers', 'Historians'))} "
                f"{rng.choice(('remember', 'mention', 'describe', 'admire'))} the {rng.choice(adjectives)} "
                f"{rng.choice(nouns)} and the {rng.choice(adjectives)} {rng.choice(nouns)}."
            )
        return f"{title}\n{' '.join(facts)}"

    def _facts(self, pair: int) -> tuple[str, str, str, str]:
        """The building, its founder, its town, and where the founder was born. The pair decides its names."""
        rng = random.Random(hash_of("made facts", self._seed, pair))
        adjectives, nouns = word_lists()["adjectives"], word_lists()["nouns"]
        town, born = (_name(number, _TOWN_ENDS) for number in rng.sample(range(_TOWNS), 2))
        # Two names and a number of the house tell a million of each apart.
        family, first = divmod(pair, _FIRST)
        founder = f"{_name(first, _NAME_ENDS)} {_capital(nouns[family])}"
        building = f"the {rng.choice(adjectives)} {rng.choice(_BUILDINGS)} No. {pair + 1} of {town}"
        return building, founder, town, born


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


_TASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


@dataclass(frozen=True)
class Answering:
    """The tasks qa_1 and qa_2."""

    source: str
    """Which questions: those of SQuAD's kind, or HotpotQA's."""
    new_tokens: int = 32
    metric: str = "part"

    def draft(self, rng: random.Random, questions: QuestionSet, index: int) -> AnsweringDraft:
        """Draw a sample: the question of a number."""
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
        """The prompt with so many distractors."""
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
        """The next two documents."""
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


NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Essays:
    """The sentences of texts one after the other, from the beginning again when they end. Read as far as needed."""

    def __init__(self, spec: str) -> None:
        """spec: a file or folder of texts, a .json, or a built-in corpus ("text", "code")."""
        self.spec = spec
        self._texts = _texts(spec)
        self._sentences: list[str] = []
        self._whole = False

    @cached_property
    def fingerprint(self) -> str:
        """Of all of the text."""
        digest = hashlib.sha256()
        for text in _texts(self.spec):
            digest.update(text.encode("utf-8") + b"\0")
        return digest.hexdigest()

    def sentences(self, start: int, stop: int) -> list[str]:
        """Return sentences by number; beyond the last, from the beginning again."""
        while len(self._sentences) < max(stop, 1) and not self._whole:
            text = next(self._texts, None)
            if text is None:
                self._whole = True
            else:
                self._sentences += split_sentences(text)
        if not self._sentences:
            raise DataError(f"essays {self.spec!r}: there is no text in it")
        if stop <= len(self._sentences):
            return self._sentences[start:stop]
        return [self._sentences[number % len(self._sentences)] for number in range(start, stop)]


def noise_words(characters: int) -> str:
    """The sentences that repeat, in one line, at least so long."""
    return " ".join(itertools.repeat(NOISE, characters // len(NOISE) + 1))


def _texts(spec: str) -> Iterator[str]:
    if spec.endswith(".json"):
        yield from _json_texts(Path(spec).expanduser())
    else:
        for document in open_source(spec).documents():
            yield document.text


def _json_texts(path: Path) -> Iterator[str]:
    """RULER's own file is an object with a text; lists of such objects or of texts are read too."""
    content = read_json_file(path)
    records: list[Any] = content if isinstance(content, list) else [content]
    for number, record in enumerate(records, 1):
        text, where = record.get("text") if isinstance(record, dict) else record, f"essays {path}, record {number}"
        if not isinstance(text, str):
            raise DataError(f'{where}: expected a text or an object with a "text"')
        yield plain_text(text, where)


SHORT = 4  # letters of the nouns that compounds are made of, at most


@cache
def compounds() -> tuple[str, ...]:
    """Two short nouns in one word, such as "owlgate", for lists that need more words than there are."""
    nouns = [noun for noun in word_lists()["nouns"] if len(noun) <= SHORT]
    return tuple(sorted({first + second for first in nouns for second in nouns} - {*single_words()}))


def adjective_nouns(rng: random.Random, count: int) -> list[str]:
    """Distinct keys such as "brave-otter"."""
    adjectives, nouns = word_lists()["adjectives"], word_lists()["nouns"]
    drawn = (divmod(number, len(nouns)) for number in rng.sample(range(len(adjectives) * len(nouns)), count))
    return [f"{adjectives[adjective]}-{nouns[noun]}" for adjective, noun in drawn]


def numbers(rng: random.Random, count: int, digits: int = 7) -> list[str]:
    """Distinct numbers of so many digits."""
    return [str(number) for number in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


def uuids(rng: random.Random, count: int) -> list[str]:
    """Random (version 4) uuids, distinct but for a chance of nothing."""
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


LARGEST = 2**30  # bytes; HotpotQA's file of the development set is a twentieth of that


def read_json_file(path: Path) -> Json:
    """Whatever value the file holds; what is wrong with it names the file and the line."""
    try:
        with open_regular(path) as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(data) > LARGEST:
        raise DataError(f"{path} is larger than {LARGEST} bytes")
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: it is not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: it is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply") from error


def plain_text(text: str, where: str) -> str:
    """The text, if it is one: JSON can escape halves of characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds what is not text: {error}") from error
    return text
