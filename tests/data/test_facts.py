"""Facts that are fixed for all of training."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from sdm.data import IGNORED, DataError, FactsConfig, open_data
from sdm.data.facts import fact_table

SMALL = FactsConfig(
    num_facts=50, num_relations=4, num_names=5, num_values=9, num_fillers=3, asked=5, spacing=6, batch_size=5
)


def told(tokens: torch.Tensor, targets: torch.Tensor) -> list[tuple[tuple[int, int, int], int]]:
    """What a row tells, read from left to right."""
    facts = []
    for place in (targets != IGNORED).nonzero().flatten().tolist():
        first, second, relation, value = tokens[place - 2 : place + 2].tolist()
        assert value == targets[place]
        assert first < 5
        assert second < 5
        assert 5 <= relation < 9 <= value < 18
        facts.append(((first, second, relation), value))
    return facts


def test_the_same_facts_in_every_step_and_split() -> None:
    known: dict[tuple[int, int, int], int] = {}
    for split in ("train", "valid"):
        source = open_data(SMALL, split, 10)
        for step in range(6):
            batch = source.batch(step, range(5))
            for tokens, targets in zip(batch.input_ids, batch.targets, strict=True):
                facts = told(tokens, targets)
                assert len(facts) == 5
                for place, value in facts:
                    assert known.setdefault(place, value) == value
    assert len(known) == 50
    assert len(fact_table(SMALL).tokens.unique(dim=0)) == 50
    other = fact_table(replace(SMALL, seed=1)).tokens
    assert not torch.equal(other, fact_table(SMALL).tokens)


def test_every_fact_once_before_any_again() -> None:
    source = open_data(SMALL, "train", 10)
    counts: Counter[tuple[int, int, int]] = Counter()
    for step in range(4):
        batch = source.batch(step, range(5))
        for tokens, targets in zip(batch.input_ids, batch.targets, strict=True):
            counts.update(place for place, _ in told(tokens, targets))
        assert max(counts.values()) == step // 2 + 1
    assert set(counts.values()) == {2}


def test_rows_are_functions_of_the_step() -> None:
    source = open_data(SMALL, "train", 10)
    whole = source.batch(3, range(5))
    assert torch.equal(open_data(SMALL, "train", 10).batch(3, [4]).input_ids[0], whole.input_ids[4])
    assert whole.input_ids.shape == (5, source.sequence_length)
    assert whole.input_ids.max() < source.vocab_size
    assert source.fingerprint != open_data(replace(SMALL, num_facts=49), "train", 10).fingerprint


def test_impossible_settings() -> None:
    with pytest.raises(DataError, match="spacing must be at least 4"):
        FactsConfig(spacing=3)
    with pytest.raises(DataError, match=r"at most num_names\^2 x num_relations = 100, got 101"):
        replace(SMALL, num_facts=101)
