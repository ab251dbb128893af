"""A needle in a haystack of text, for language models: a number is told somewhere in a long text, and asked for at its
end. It is simpler than RULER's: one needle, one form of words, and the answer is right if every token of it is the
likeliest one, which takes one pass and no generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from sdm.data.batch import IGNORED, Batch
from sdm.data.errors import DataError
from sdm.data.randomness import hash_of
from sdm.data.sources import open_source
from sdm.errors import UserError
from sdm.evaluation.recall_tasks import TEXT_NEEDLE, Row, Size, Task
from sdm.evaluation.subject import Subject

LENGTHS = (256, 512, 1024, 2048)
DIGITS = 5
PLACES = ("harbour", "garden", "library", "castle", "bakery", "station", "museum", "mill", "chapel", "market")
TOLD, ASKED = "\nThe secret number of the {place} is {number}.\n", "\nThe secret number of the {place} is"
CHARACTERS = 2**22  # of haystack, at most


def text_needle(subject: Subject, source: str, sizes: tuple[int, ...], seed: int) -> Task:
    """The task in the tokens of a model."""
    limit = subject.context_limit
    lengths = sizes or tuple(length for length in LENGTHS if limit is None or length <= limit) or LENGTHS[:1]
    words = [subject.encode(text.format(place=PLACES[0], number="1" * DIGITS)) for text in (TOLD, ASKED)]
    least = 2 * sum(map(len, words))
    for length in lengths:
        if length < least:
            raise UserError(f"--sizes: needle and question take a text of {least} tokens at least, got {length}")
    hay = _haystack(subject, source, max(lengths))
    lengths = sizes or tuple(length for length in lengths if length <= len(hay)) or lengths[:1]
    if len(hay) < max(lengths):
        raise UserError(f"--haystack: {source!r} has {len(hay)} tokens, fewer than a row of {max(lengths)}")

    def row(size: Size, number: int) -> Row:
        rng = Random(hash_of(seed, TEXT_NEEDLE, size.number, number))
        place, secret = rng.choice(PLACES), "".join(rng.choices("0123456789", k=DIGITS))
        told = subject.encode(TOLD.format(place=place, number=secret))
        asked = subject.encode(ASKED.format(place=place))
        answer = subject.encode(f"{ASKED.format(place=place)} {secret}")[len(asked) :]
        room = size.number - 1 - len(told) - len(asked) - len(answer)
        start, depth = rng.randrange(len(hay) - room + 1), rng.random()
        cut = start + round(depth * room)
        whole = [subject.start_id, *hay[start:cut], *told, *hay[cut : start + room], *asked, *answer]
        targets = torch.full((1, size.number - 1), IGNORED)
        targets[0, -len(answer) :] = torch.tensor(answer)
        return Row(Batch(torch.tensor([whole[:-1]]), targets), depth=torch.full((len(answer),), depth))

    sized = tuple(Size(length, length, 1) for length in lengths)
    data = {"haystack": source, "tokens": len(hay), "sha": hash_of(*map(str, hay))}
    return Task(TEXT_NEEDLE, "A number told in a text", subject.vocab_size, "tokens of a row", sized, row, data)


def _haystack(subject: Subject, source: str, length: int) -> list[int]:
    """Tokens of the first documents of a source, four times as many as a row takes."""
    tokens: list[int] = []
    for text in _texts(source):
        tokens += subject.encode(text + "\n")
        if len(tokens) >= 4 * length:
            break
    return tokens


def _texts(source: str) -> Iterator[str]:
    left = CHARACTERS
    try:
        for document in open_source(source).documents():
            yield document.text[:left]
            left -= len(document.text)
            if left <= 0:
                return
    except DataError as error:
        raise UserError(f"--haystack: {error}") from error
