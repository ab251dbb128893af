from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdm.data import DataError
from sdm.data.corpus import BLOCK, Mixture, shares


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=6), st.integers(1, 100))
def test_shares_add_up_and_are_near(weights: list[float], size: int) -> None:
    counts = shares(weights, size)
    assert sum(counts) == size
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - size * weight / sum(weights)) < 1


def test_each_source_is_dealt_its_own_numbers_in_order() -> None:
    mixture = Mixture((1, 3, 4), seed=0)
    dealt = [mixture.deal(i) for i in range(3 * BLOCK)]
    for source in range(3):
        assert [count for s, count in dealt if s == source] == list(range(sum(s == source for s, _ in dealt)))
    assert Counter(source for source, _ in dealt) == {0: 3 * BLOCK // 8, 1: 9 * BLOCK // 8, 2: 12 * BLOCK // 8}
    assert len({source for source, _ in dealt[:32]}) == 3


def test_one_source_is_counted_through() -> None:
    mixture = Mixture((2.5,), seed=0)
    assert [mixture.deal(i) for i in (0, 1, 10**12)] == [(0, 0), (0, 1), (0, 10**12)]


def test_a_weight_that_rounds_to_nothing() -> None:
    with pytest.raises(DataError, match=r"weights\[1\]"):
        Mixture((1, 1e-6), seed=0)
