from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from sdm.data import IGNORED, Synthetic, SyntheticConfig, open_data
from sdm.data.synthetic import NUM_NOISE, TASKS
from sdm.data.task_config import SYNTHETIC_SIZES

ROWS = range(8)


def rows(config: SyntheticConfig, split: str = "train", step: int = 0) -> list[tuple[list[int], dict[int, int]]]:
    batch = Synthetic(config, split).batch(step, ROWS)
    return [
        (tokens, {i: target for i, target in enumerate(targets) if target != IGNORED})
        for tokens, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True)
    ]


@pytest.mark.parametrize("task", TASKS)
def test_shapes_and_determinism(task: str) -> None:
    source = open_data(SyntheticConfig(task=task, batch_size=8))  # type: ignore[arg-type]
    batch = source.batch(3, ROWS)
    assert batch.input_ids.shape == (8, SYNTHETIC_SIZES[task][1])
    assert batch.num_targets > 0
    assert int(torch.maximum(batch.input_ids, batch.targets).max()) < source.vocab_size
    assert torch.equal(source.batch(3, [5, 1]).input_ids, batch.input_ids[[5, 1]])
    assert not torch.equal(source.batch(4, ROWS).input_ids, batch.input_ids)
    assert not torch.equal(open_data(source.config, "valid").batch(3, ROWS).input_ids, batch.input_ids)  # type: ignore[attr-defined]


def test_in_context_recall() -> None:
    for tokens, targets in rows(SyntheticConfig()):
        seen: dict[int, int] = {}
        for i in range(0, len(tokens), 2):
            key, value = tokens[i : i + 2]
            assert targets.get(i) == seen.get(key)
            assert i + 1 not in targets
            seen.setdefault(key, value)
            assert seen[key] == value


def test_noise_stands_between_the_pairs() -> None:
    for tokens, targets in rows(SyntheticConfig(task="noisy-recall", noise=0.25)):
        noise = [token for token in tokens if token >= 18]
        assert len(noise) == 32
        assert max(noise) < 18 + NUM_NOISE
        content = [token for token in tokens if token < 18]
        value_of = dict(zip(content[::2], content[1::2], strict=True))
        assert all(tokens[i + 1] == target == value_of[tokens[i]] for i, target in targets.items())
        assert any(a >= 18 > b for a, b in pairwise(tokens[:64]))


def test_fuzzy_values_are_predicted_whole() -> None:
    longest = 0
    for tokens, targets in rows(SyntheticConfig(task="fuzzy-recall")):
        assert all(tokens[i + 1] == target for i, target in targets.items())
        seen: dict[tuple[int, ...], tuple[int, ...]] = {}
        place = 0
        while place < len(tokens) and tokens[place] < 16:
            start = place
            while tokens[place] < 8:
                place += 1
            key, middle = tuple(tokens[start:place]), place
            while place < len(tokens) and 8 <= tokens[place] < 16:
                place += 1
            value = tuple(tokens[middle:place])
            longest = max(longest, len(key))
            known = key in seen
            assert seen.setdefault(key, value) == value
            assert [i in targets for i in range(middle - 1, place - 1)] == [known] * len(value)
    assert longest > 1


def test_selective_copying() -> None:
    for tokens, targets in rows(SyntheticConfig(task="selective-copying")):
        content = [token for token in tokens if token < 16]
        assert tokens[-16:] == [16] * 16
        assert list(targets.items()) == list(enumerate(content, len(tokens) - 16))


def test_compression() -> None:
    for tokens, targets in rows(SyntheticConfig(task="compression")):
        assert list(targets.items()) == list(enumerate(tokens[:16], 16))


def test_memorized_values_are_the_same_everywhere_and_never_shown() -> None:
    value_of: dict[int, int] = {}
    config = SyntheticConfig(task="memorization", num_tokens=32)
    for tokens, targets in rows(config) + rows(config, "test", 7):
        assert not any(16 <= token < 32 for token in tokens)
        for i, target in targets.items():
            assert tokens[i] == 32
            assert value_of.setdefault(tokens[i - 1], target) == target
    assert len(value_of) == 16
