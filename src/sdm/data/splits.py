"""Which documents are trained on and which are held out.

There are two held-out sets: what was chosen by looking at `valid` is reported on `test`.
"""

from __future__ import annotations

from collections.abc import Iterator

from sdm.data.errors import DataError
from sdm.data.randomness import hash_of
from sdm.data.sources import Document, Source

SPLITS = ("train", "valid", "test")
# Below this, drawing documents would too often leave a split empty: each document is cut instead.
FEW_DOCUMENTS = 200


def check_fractions(valid_fraction: float, test_fraction: float) -> None:
    """Raise a `DataError` unless the fractions leave something to train on."""
    for name, value in (("valid_fraction", valid_fraction), ("test_fraction", test_fraction)):
        if not 0 <= value < 1:
            raise DataError(f"{name} must be at least 0 and below 1, got {value}")
    if valid_fraction + test_fraction >= 1:
        raise DataError(
            f"valid_fraction + test_fraction must leave something to train on, got {valid_fraction + test_fraction}"
        )


def split_documents(source: Source, valid_fraction: float, test_fraction: float) -> Iterator[tuple[str, Document]]:
    """Every document with its split.

    A document's split follows from its name alone: adding documents moves none of the others. A source of few
    documents has each of them cut: the beginning is trained on, the end is held out.
    """
    check_fractions(valid_fraction, test_fraction)
    few = not source.has(FEW_DOCUMENTS)
    for document in source.documents():
        if few:
            yield from _cut(document, valid_fraction, test_fraction)
        else:
            yield _draw(document.name, valid_fraction, test_fraction), document


def _draw(name: str, valid_fraction: float, test_fraction: float) -> str:
    place = hash_of("split", name) / 2**64
    if place < test_fraction:
        return "test"
    return "valid" if place < test_fraction + valid_fraction else "train"


def _cut(document: Document, valid_fraction: float, test_fraction: float) -> Iterator[tuple[str, Document]]:
    """Cut at the ends of lines where there are some nearby, so that no line is on both sides."""
    text, start = document.text, 0
    for split, share in zip(SPLITS, (1 - valid_fraction - test_fraction, 1 - test_fraction, 1.0), strict=True):
        stop = round(share * len(text))
        if stop < len(text):
            end_of_line = text.rfind("\n", start, stop)
            stop = end_of_line + 1 if end_of_line > start + (stop - start) // 2 else stop
        yield split, Document(f"{document.name}#{split}", text[start:stop])
        start = stop
