"""The published tasks of MAD, by what its own generator gives at the baselines."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

import pytest
import torch

from sdm.data import IGNORED, MAD, MADTaskConfig, open_data
from sdm.data.mad import MAD_BASELINES, TASKS

Row = tuple[list[int], dict[int, int]]


def rows(task: Any, split: str = "test", count: int = 8, **fields: Any) -> list[Row]:
    batch = MAD(MADTaskConfig(task, **fields), split).batch(0, range(count))
    return [
        (tokens, {i: target for i, target in enumerate(targets) if target != IGNORED})
        for tokens, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True)
    ]


@pytest.mark.parametrize("task", TASKS)
def test_shapes_and_determinism(task: Any) -> None:
    source = open_data(MADTaskConfig(task, batch_size=8))
    batch = source.batch(3, range(8))
    assert batch.input_ids.shape == (8, source.sequence_length)
    assert source.vocab_size == MAD_BASELINES[task].vocab_size
    assert int(torch.maximum(batch.input_ids, batch.targets).max()) < source.vocab_size
    assert torch.equal(source.batch(3, [5, 1]).input_ids, batch.input_ids[[5, 1]])
    assert not torch.equal(source.batch(4, range(8)).input_ids, batch.input_ids)
    assert not torch.equal(open_data(source.config, "valid").batch(3, range(8)).input_ids, batch.input_ids)  # type: ignore[attr-defined]


def test_published_baselines() -> None:
    """Vocabulary, length and training rows; what a model sees of them; batches of 128."""
    sizes = {task: (one.vocab_size, one.sequence_length, one.num_examples) for task, one in MAD_BASELINES.items()}
    assert sizes == {
        "in-context-recall": (16, 128, 12_800),
        "fuzzy-in-context-recall": (16, 128, 12_800),
        "noisy-in-context-recall": (32, 128, 12_800),
        "selective-copying": (16, 256, 12_800),
        "memorization": (256, 32, 256),
        "compression": (16, 32, 12_800),
    }
    assert MADTaskConfig().batch_size == 128
    assert MAD(MADTaskConfig()).sequence_length == 127


def test_examples_repeat_in_another_order() -> None:
    source = MAD(MADTaskConfig("memorization", num_examples=6, batch_size=4))
    seen = [tuple(row) for step in range(3) for row in source.batch(step, range(4)).input_ids.tolist()]
    assert len(set(seen)) == 6
    assert sorted(seen[:6]) == sorted(seen[6:])
    assert seen[:6] != seen[6:]


@pytest.mark.parametrize("task", ["in-context-recall", "fuzzy-in-context-recall", "noisy-in-context-recall"])
def test_recall_is_trained_on_every_token(task: Any) -> None:
    for tokens, targets in rows(task, "train"):
        assert list(targets) == list(range(len(tokens)))
        assert [targets[i] for i in range(len(tokens) - 1)] == tokens[1:]


def test_in_context_recall_asks_for_keys_that_came_before() -> None:
    for tokens, targets in rows("in-context-recall"):
        value_of: dict[int, int] = {}
        for i in range(0, len(tokens) - 1, 2):
            assert targets.get(i) == value_of.get(tokens[i])
            assert tokens[i] < 8 <= tokens[i + 1] < 16
            value_of[tokens[i]] = tokens[i + 1]
        assert targets[126] == value_of[tokens[126]]


def test_noise_comes_in_twos() -> None:
    """62 of the 64 pairs are noise with a likelihood of a fifth: 24.8 tokens, standard deviation 6.3."""
    counts = []
    for tokens, targets in rows("noisy-in-context-recall", count=400):
        noise = [token >= 16 for token in tokens]
        assert noise[:126:2] == noise[1:126:2]
        assert not noise[126]
        assert 126 in targets
        value_of: dict[int, int] = {}
        for i in range(0, 126, 2):
            if not noise[i]:
                assert targets.get(i) == value_of.get(tokens[i])
                value_of[tokens[i]] = tokens[i + 1]
        counts.append(sum(noise))
    assert mean(counts) == pytest.approx(24.8, abs=1)
    assert stdev(counts) == pytest.approx(6.3, abs=0.7)


def fuzzy_pairs(tokens: list[int]) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Key, value and where the value begins, of a row with the last value's last token."""
    pairs, place = [], 0
    while tokens[place] == 15:
        place += 1
    while place < len(tokens):
        start = place
        while tokens[place] < 7:
            place += 1
        middle = place
        while place < len(tokens) and tokens[place] >= 7:
            place += 1
        pairs.append((tuple(tokens[start:middle]), tuple(tokens[middle:place]), middle))
    return pairs


def test_fuzzy_recall() -> None:
    """MAD's generator gives 22.6 different keys of three tokens and 4.5 targets a row (means)."""
    keys, targets_a_row = [], []
    for tokens, targets in rows("fuzzy-in-context-recall", count=400):
        pairs = fuzzy_pairs([*tokens, targets[len(tokens) - 1]])
        value_of: dict[tuple[int, ...], tuple[int, ...]] = {}
        expected = {}
        for key, value, place in pairs:
            assert len(key) == len(set(key)) == 3
            assert 1 <= len(value) == len(set(value)) <= 3
            if key in value_of:
                assert value_of[key] == value
                expected |= {place - 1 + i: token for i, token in enumerate(value)}
            value_of[key] = value
        assert targets == expected
        assert pairs[-1][0] in {key for key, _, _ in pairs[:-1]}
        keys.append(len(value_of))
        targets_a_row.append(len(targets))
    assert mean(keys) == pytest.approx(22.6, abs=0.5)
    assert mean(targets_a_row) == pytest.approx(4.5, abs=0.5)


def test_fuzzy_keys_of_training_have_any_length() -> None:
    lengths = []
    for tokens, targets in rows("fuzzy-in-context-recall", "train", count=100):
        lengths += [len(key) for key, _, _ in fuzzy_pairs([*tokens, targets[127]])]
    assert set(lengths) == {1, 2, 3}
    assert mean(lengths) == pytest.approx(2, abs=0.1)


def test_selective_copying() -> None:
    """14 contents, one copy token right behind the last of them, then blanks."""
    contents = set()
    for tokens, targets in rows("selective-copying", count=40):
        assert len(tokens) == 256
        assert tokens[239] == 15
        assert tokens[240:] == [14] * 16
        assert tokens[238] < 14
        content = [token for token in tokens if token < 14]
        assert targets == dict(enumerate(content, 240))
        contents |= set(content)
    assert contents == set(range(14))


def test_memorization_maps_127_keys_to_127_values() -> None:
    value_of: dict[int, int] = {}
    for tokens, targets in rows("memorization", "train", 256) + rows("memorization", "test", 128):
        assert tokens[1::2] == [255] * 16
        assert set(targets) == set(range(1, 32, 2))
        for i, target in targets.items():
            assert value_of.setdefault(tokens[i - 1], target) == target
    assert set(value_of) == set(range(127))
    assert len(set(value_of.values())) == 127
    assert 127 <= min(value_of.values()) <= max(value_of.values()) < 255


def test_compression_is_of_31_tokens() -> None:
    for tokens, targets in rows("compression"):
        assert max(tokens[:31]) < 15
        assert tokens[31:] == [15] * 31
        assert targets == dict(enumerate(tokens[:31], 31))
