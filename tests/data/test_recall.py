from __future__ import annotations

import pytest
import torch

from sdm.data import IGNORED, Batches, DataError, Recall, RecallConfig, open_data, recall_batch

SMALL = RecallConfig(num_pairs=16, start_pairs=2, num_keys=32, num_values=8, batch_size=4)


def test_targets_are_the_values_of_the_queried_keys() -> None:
    batch = recall_batch(SMALL, 16, torch.Generator().manual_seed(0))
    assert batch.input_ids.shape == (4, 48)
    for tokens, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True):
        value_of = dict(zip(tokens[0:32:2], tokens[1:32:2], strict=True))
        assert len(value_of) == 16
        assert max(value_of) < 32 <= min(value_of.values())
        assert set(targets[:32]) == {IGNORED}
        assert targets[32:] == [value_of[key] for key in tokens[32:]]
        assert sorted(tokens[32:]) == sorted(value_of)


def test_fewer_queries() -> None:
    config = RecallConfig(num_pairs=16, num_keys=32, num_queries=3, batch_size=2)
    batch = Recall(config, "valid").batch(0, [0, 1])
    assert batch.input_ids.shape == (2, 35)
    assert batch.num_targets == 6


def test_curriculum() -> None:
    """Flat for a fifth, exponential to three fifths, then flat."""
    source = Recall(RecallConfig(), total_steps=1000)
    ks = [source.pairs_at(step) for step in range(1000)]
    assert set(ks[:200]) == {8}
    assert ks[300] == round(8 * 32**0.25)
    assert ks[400] == round(8 * 32**0.5)
    assert set(ks[600:]) == {256}
    assert ks == sorted(ks)


def test_batches_are_functions_of_seed_step_and_split() -> None:
    source = open_data(SMALL, total_steps=10)
    again = Batches(open_data(SMALL, total_steps=10), step=9)
    whole = source.batch(9, range(4))
    assert torch.equal(next(again).input_ids, whole.input_ids)
    assert torch.equal(source.batch(9, [1, 3]).input_ids, whole.input_ids[1::2])
    assert whole.input_ids.shape[1] == source.sequence_length
    assert source.batch(0, range(4)).input_ids.shape[1] == 6
    for other in (open_data(SMALL, "valid"), open_data(SMALL, "test")):
        assert not torch.equal(other.batch(9, range(4)).input_ids, whole.input_ids)
        assert other.batch(0, range(4)).input_ids.shape[1] == source.sequence_length
    assert int(whole.input_ids.max()) < source.vocab_size


def test_a_curriculum_needs_its_length() -> None:
    with pytest.raises(DataError, match="total_steps"):
        open_data(SMALL)
