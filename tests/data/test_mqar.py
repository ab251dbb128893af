"""The published MQAR, by Zoology's definition and settings."""

from __future__ import annotations

from collections import Counter

import torch

from sdm.data import IGNORED, MQAR, MQARTaskConfig, open_data
from sdm.data.mqar import mqar_row

CONFIG = MQARTaskConfig(train_segments=((64, 4, 40), (128, 8, 20)), test_segments=((64, 16), (128, 32)), batch_size=8)


def test_published_settings() -> None:
    config = MQARTaskConfig()
    assert config.vocab_size == 8192
    assert {pairs for _, pairs, _ in config.train_segments} == {4, 8, 16, 32, 64}
    assert sum(rows for _, _, rows in config.train_segments) == 180_000
    assert config.test_segments[-1] == (1024, 256)
    assert config.batch_size == 256
    assert MQAR(config).sequence_length == 256


def test_row() -> None:
    """Different keys and different values; every key is asked once; all else is any token."""
    config, generator = MQARTaskConfig(), torch.Generator().manual_seed(0)
    fillers: list[int] = []
    for _ in range(50):
        tokens, targets = (x.tolist() for x in mqar_row(config, 256, 32, generator))
        value_of = dict(zip(tokens[0:64:2], tokens[1:64:2], strict=True))
        assert len(value_of) == len(set(value_of.values())) == 32
        assert 0 < min(value_of) <= max(value_of) < 4096 <= min(value_of.values())
        asked = [i for i, target in enumerate(targets) if target != IGNORED]
        assert sorted(tokens[i] for i in asked) == sorted(value_of)
        assert all(targets[i] == value_of[tokens[i]] for i in asked)
        assert min(asked) >= 64
        assert not any(i % 2 for i in asked)
        fillers += [tokens[i] for i in range(64, 256) if i not in asked]
    assert len(set(fillers)) > 3000, "filler is random"
    assert min(fillers) < 100 < 8000 < max(fillers)


def test_gaps_follow_a_power_law() -> None:
    """A single query comes i places after the pairs with a likelihood as 1 / i^0.99."""
    config, generator = MQARTaskConfig(), torch.Generator().manual_seed(0)
    counts = Counter(int((mqar_row(config, 66, 1, generator)[1] != IGNORED).nonzero()) // 2 - 1 for _ in range(4000))
    weights = [i**-0.99 for i in range(1, 33)]
    for place in (0, 1, 3, 15):
        expected = weights[place] / sum(weights)
        error = (expected * (1 - expected) / 4000) ** 0.5
        assert abs(counts[place] / 4000 - expected) < 4 * error, place
    tokens, _ = mqar_row(MQARTaskConfig(random_filler=False), 66, 1, generator)
    assert int((tokens == 0).sum()) == 63


def test_an_epoch_has_every_row_once() -> None:
    source = MQAR(CONFIG)
    assert CONFIG.steps_per_epoch == 7
    epochs = []
    for epoch in range(2):
        batches = [source.batch(7 * epoch + step, range(8)) for step in range(7)]
        assert Counter(batch.input_ids.shape[1] for batch in batches) == {64: 5, 128: 2}
        short = [tuple(row) for batch in batches if batch.input_ids.shape[1] == 64 for row in batch.input_ids.tolist()]
        assert len(set(short)) == 40
        epochs.append(short)
    assert epochs[0] != epochs[1]
    assert set(epochs[0]) == set(epochs[1])


def test_batches_are_functions_of_seed_step_and_split() -> None:
    source = open_data(CONFIG)
    whole = source.batch(9, range(8))
    assert torch.equal(source.batch(9, [1, 3]).input_ids, whole.input_ids[[1, 3]])
    held_out = open_data(CONFIG, "test")
    assert held_out.batch_size == 1
    assert [held_out.batch(step, [0]).num_targets for step in range(4)] == [16, 32, 16, 32]
    assert not torch.equal(held_out.batch(0, [0]).input_ids, open_data(CONFIG, "valid").batch(0, [0]).input_ids)
    assert source.fingerprint != held_out.fingerprint
