"""Text of RULER's tasks: noise and essays to hide needles in, word lists, and JSON files of others."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import uuid
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from sdm.data.retrieval_rows import single_words, split_sentences, word_lists
from sdm.data.sources import open_source
from sdm.errors import DataError
from sdm.files import Json, open_regular

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
