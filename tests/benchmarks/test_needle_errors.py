"""Kinds of wrong answers to a question about one of many needles."""

from __future__ import annotations

import pytest
from benchmarks._needle_errors import kind_of_error

ANSWER = "1234567"
NUMBERS = [ANSWER, "9034128", "7777771", "4155555"]


@pytest.mark.parametrize(
    ("output", "kind", "chance"),
    [
        (" key is key is", "no number", 0.0),
        (" key is: 7777771.", "another needle's number", 0.0),
        (" key is: 7711111.", "begins as another needle's number", 0.0),
        (" key is: 6611111.", "begins with other digits", 0.0),
        (" key is: 1234128.", "begins right, walks to another needle", 0.01),
        (" key is: 1299999.", "begins right, other", 0.01),
        (" key is:123499.", "begins right, other", 0.01),
    ],
)
def test_kinds(output: str, kind: str, chance: float) -> None:
    assert kind_of_error(output, ANSWER, NUMBERS, 2) == (kind, chance)


def test_a_walk_may_begin_at_any_group_of_another_needle() -> None:
    walk = "begins right, walks to another needle"
    assert kind_of_error("is: 1277000", ANSWER, [ANSWER, "8812770"], 2) == (walk, 0.01)
    assert kind_of_error("is: 1238880", ANSWER, [ANSWER, "9991234", "1238880"], 3) == ("another needle's number", 0.0)
    assert kind_of_error("is: 1238881", ANSWER, [ANSWER, "1238880"], 3) == (walk, 0.001)
    assert kind_of_error("is: 1234569", ANSWER, [ANSWER, "4569990", "1114569"], 3) == (walk, 0.2)
