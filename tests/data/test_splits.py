from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sdm.data import DataError, split_documents

Make = Callable[..., Any]


def test_many_documents_are_drawn_by_name(make_source: Make) -> None:
    texts = [f"text {i}" for i in range(1000)]
    splits = {document.name: split for split, document in split_documents(make_source(texts), 0.1, 0.1)}
    assert len(splits) == 1000
    counts = Counter(splits.values())
    assert 60 < counts["valid"] < 140
    assert 60 < counts["test"] < 140
    more = {document.name: split for split, document in split_documents(make_source([*texts, "one more"]), 0.1, 0.1)}
    assert splits.items() <= more.items()


def test_few_documents_are_cut(make_source: Make) -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    parts = list(split_documents(make_source([text, "x" * 100]), 0.1, 0.2))
    assert [split for split, _ in parts] == ["train", "valid", "test"] * 2
    assert "".join(document.text for _, document in parts) == text + "x" * 100
    assert all(document.text.endswith("\n") for _, document in parts[:3])
    assert [len(document.text) for _, document in parts[3:]] == [70, 10, 20]


@pytest.mark.parametrize(
    ("valid", "test", "field"),
    [(-0.1, 0, "valid_fraction"), (0, 1, "test_fraction"), (0.5, 0.5, "train on")],
)
def test_fractions_are_checked(make_source: Make, valid: float, test: float, field: str) -> None:
    with pytest.raises(DataError, match=field):
        list(split_documents(make_source(["a"]), valid, test))
