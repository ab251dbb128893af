"""Text to hide things in: sentences that repeat, or essays."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from sdm.data.errors import DataError
from sdm.data.sources import open_source
from sdm.evaluation.ruler.json_file import plain_text, read_json_file

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LONGEST = 60  # words of a sentence: what has no full stops is cut
_SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]])) (?=["'(\[]?[A-Z0-9])""")


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


def split_sentences(text: str) -> list[str]:
    """Without line breaks; every space is one space."""
    sentences = []
    for sentence in _SENTENCE_END.split(" ".join(text.split())):
        words = sentence.split()
        for start in range(0, len(words), LONGEST):
            sentences.append(" ".join(words[start : start + LONGEST]))
    return sentences


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
