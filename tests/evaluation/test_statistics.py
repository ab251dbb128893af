"""Means, their intervals, and differences document by document."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from sdm.errors import UserError
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.measurement import evaluate
from sdm.evaluation.nll import Likelihood
from sdm.evaluation.statistics import Difference, compare, comparison_table, student_quantile, weighted_mean


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (10, 2.22814), (29, 2.04523), (1000, 1.96234)]
)
def test_student(freedom: int, expected: float) -> None:
    """The tables' values."""
    assert student_quantile(freedom) == pytest.approx(expected, abs=2e-5)


def test_interval_covers_as_often_as_it_says() -> None:
    """Long documents weigh more and scatter less, as documents do."""
    generator, covered, trials = torch.Generator().manual_seed(3), 0, 600
    for _ in range(trials):
        weights = torch.rand(12, generator=generator) + 0.5
        values = 2.0 + torch.randn(12, generator=generator) / weights.sqrt()
        mean = weighted_mean(values.tolist(), weights.tolist())
        assert mean.low is not None
        assert mean.high is not None
        covered += mean.low <= 2.0 <= mean.high
    assert 0.92 <= covered / trials <= 0.98


@pytest.mark.parametrize(
    ("seeds", "drawn", "over"),
    [
        ([{"a": 1.0, "b": 3.0}, {"a": 1.1, "b": 3.1}], [1.05, 3.05], "documents"),  # documents differ more than seeds
        ([{"a": 1.0, "b": 1.1}, {"a": 3.0, "b": 3.1}], [1.05, 3.05], "seeds"),
        ([{"a": 1.0, "b": 3.0}], [1.0, 3.0], "documents"),
        ([{"a": 1.0, "b": 3.0, "c": 7.0}, {"a": 1.0, "b": 3.0}], [1.0, 3.0], "documents"),  # c has no partner
    ],
)
def test_differences_are_as_uncertain_as_documents_and_seeds_make_them(
    seeds: list[dict[str, float]], drawn: list[float], over: str
) -> None:
    difference = Difference.paired(seeds)
    expected = weighted_mean(drawn)
    assert difference is not None
    assert (difference.value, difference.low, difference.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )
    assert difference.interval.startswith(f"95% interval over {over}; 2 documents, {len(seeds)} seed")


def test_without_a_second_document_or_seed_there_is_no_interval() -> None:
    alone = Difference.paired([{"a": 1.0}])
    assert alone is not None
    assert alone.interval == "no interval: 1 documents, 1 seed"
    assert Difference.paired([]) is None
    assert Difference.paired([{"a": 1.0}, {"b": 1.0}]) is None
    assert Difference.over_seeds([0.5]) == Difference(0.5, None, None, "no interval: 1 seed", (0.5,))
    assert Difference.over_seeds([]) is None


def test_mean() -> None:
    mean = weighted_mean([1.0, 3.0], [3.0, 1.0])
    assert mean.value == 1.5
    assert weighted_mean([4.0]).low is None
    plain = weighted_mean([1.0, 2.0, 3.0])
    assert plain.high == pytest.approx(2 + 4.30265 / math.sqrt(3), abs=1e-4)
    with pytest.raises(ValueError, match="at least one value"):
        weighted_mean([])


def test_differences_are_paired(folders: dict[str, Path], texts: Path, tmp_path: Path) -> None:
    """The mean difference is the difference of the means; documents that one lacks are left out."""
    measurement = Likelihood(data=(str(texts),))
    models = [(open_model(folder), tmp_path / f"out-{name}") for name, folder in folders.items()]
    first, second = evaluate("nll", measurement, models)
    assert first.summary is not None
    assert second.summary is not None
    tokens, per_byte = compare(measurement, first, second)
    assert tokens.quantity == "nats/token"
    assert tokens.difference.value == pytest.approx(second.summary["nll"] - first.summary["nll"])
    assert per_byte.difference.value == pytest.approx(second.summary["bits_per_byte"] - first.summary["bits_per_byte"])
    del second.units[next(iter(second.units))]
    assert compare(measurement, first, second)[0].difference.count == 5
    # With another tokenizer the tokens are others, also where there are as many: only bytes can be compared.
    second.model["fingerprint"]["tokenizer"] = "another"
    assert [one.quantity for one in compare(measurement, first, second)] == ["bits/byte"]
    table = comparison_table(measurement, [("a", first), ("b", second)])
    assert table is not None
    assert table.rows[0][0] == "b - a"
    second.settings["context"] = 7
    with pytest.raises(UserError, match=r"settings\.context is None for the first and 7 for the second"):
        compare(measurement, first, second)
