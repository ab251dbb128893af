from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdm.data.randomness import Permutation, generator_of, hash_of


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(0, 2**40))
def test_permutation_is_one(size: int, seed: int) -> None:
    permutation = Permutation(size, seed)
    assert sorted(permutation[i] for i in range(size)) == list(range(size))


def test_permutation_mixes() -> None:
    """Neighbours do not stay neighbours, and another seed gives another order."""
    size = 4096
    images = torch.tensor([Permutation(size, 1)[i] for i in range(size)], dtype=torch.float64)
    places = torch.arange(size, dtype=torch.float64)
    assert abs(torch.corrcoef(torch.stack((images, places)))[0, 1]) < 0.06
    assert abs(torch.corrcoef(torch.stack((images[1:], images[:-1])))[0, 1]) < 0.06
    assert [Permutation(size, 2)[i] for i in range(8)] != images[:8].tolist()


def test_permutation_of_billions_costs_nothing() -> None:
    assert 0 <= Permutation(10**12, 0)[10**11] < 10**12


@pytest.mark.parametrize("index", [-1, 5])
def test_permutation_checks_its_index(index: int) -> None:
    with pytest.raises(IndexError):
        Permutation(5, 0)[index]


def test_hashes_stay_what_they_are() -> None:
    """Splits and orders of existing runs follow from these numbers."""
    assert hash_of("split", "a.txt") == 12246691371753435408
    assert hash_of(1, 23) != hash_of(12, 3)
    assert torch.rand(1, generator=generator_of(0)) == torch.rand(1, generator=generator_of(0))
