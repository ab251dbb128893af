"""Recall of the last of several values, and needles."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from sdm.data import IGNORED, DataError, NeedleConfig, RebindingConfig, open_data
from sdm.data.needle import needle_rows
from sdm.data.rebinding import rebinding_rows

SMALL = RebindingConfig(num_pairs=8, start_pairs=2, num_bindings=3, num_keys=20, num_values=10, batch_size=4)
STACK = NeedleConfig(
    sequence_length=64, start_length=16, num_needles=3, num_keys=9, num_values=7, num_fillers=5, batch_size=4
)


def test_the_last_value_counts() -> None:
    """By a program that reads a row from left to right."""
    rows = rebinding_rows(SMALL, 8, 3, 50, torch.Generator().manual_seed(0))
    last_places = Counter()
    for tokens, targets, former in zip(
        rows.batch.input_ids.tolist(), rows.batch.targets.tolist(), rows.former_BKJ.tolist(), strict=True
    ):
        assert len(tokens) == 8 * 7
        history: dict[int, list[int]] = {}
        for place in range(0, 48, 2):
            history.setdefault(tokens[place], []).append(tokens[place + 1])
        assert len(history) == 8
        assert max(history) < 20
        assert all(len(values) == len(set(values)) == 3 and min(values) >= 20 for values in history.values())
        assert set(targets[:48]) == {IGNORED}
        assert sorted(tokens[48:]) == sorted(history)
        for key, target, others in zip(tokens[48:], targets[48:], former, strict=True):
            assert [*others, target] == history[key]
        last_places.update(place // 2 for place in range(0, 48, 2) if tokens[place + 1] == history[tokens[place]][-1])
    assert len(last_places) > 16, "last bindings are spread over the row"


def test_one_binding_is_plain_recall() -> None:
    rows = rebinding_rows(SMALL, 4, 1, 2, torch.Generator().manual_seed(0))
    assert rows.former_BKJ.shape == (2, 4, 0)
    assert rows.batch.input_ids.shape == (2, 12)


def test_needles_are_where_they_are_said_to_be() -> None:
    rows = needle_rows(STACK, 40, 200, torch.Generator().manual_seed(0))
    depths: list[float] = []
    for tokens, targets, depth in zip(
        rows.batch.input_ids.tolist(), rows.batch.targets.tolist(), rows.depth_BK.tolist(), strict=True
    ):
        hay, queries = tokens[:37], tokens[37:]
        for key, target, place in zip(queries, targets[37:], depth, strict=True):
            (found,) = [i for i, token in enumerate(hay) if token == key]
            assert hay[found + 1] == target
            assert place == pytest.approx(found / 2 / 17)
        assert sum(token < 16 for token in hay) == 6
        assert all(token >= 16 for token in set(hay) if token not in {*queries, *targets})
        depths += depth
    assert min(depths) == 0
    assert max(depths) == 1
    assert sum(depths) / len(depths) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("config", [SMALL, STACK])
def test_batches_are_functions_of_seed_step_and_split(config: RebindingConfig | NeedleConfig) -> None:
    source = open_data(config, total_steps=10)
    whole = source.batch(9, range(4))
    assert whole.input_ids.shape == (4, source.sequence_length)
    assert torch.equal(open_data(config, total_steps=10).batch(9, [1, 3]).input_ids, whole.input_ids[1::2])
    assert int(whole.input_ids.max()) < source.vocab_size
    for split in ("valid", "test"):
        other = open_data(config, split)
        assert other.batch(0, range(4)).input_ids.shape == whole.input_ids.shape
        assert not torch.equal(other.batch(9, range(4)).input_ids, whole.input_ids)
        assert other.fingerprint != source.fingerprint
    first = source.batch(0, range(4)).input_ids
    assert first.numel() <= whole.input_ids.numel() < 2 * first.numel(), "short rows fill the place of long ones"
    assert first.shape[1] <= source.sequence_length // 4
    with pytest.raises(DataError, match="total_steps"):
        open_data(config)


def test_rows_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="num_pairs must be between 1 and num_keys = 20, got 21"):
        rebinding_rows(SMALL, 21, 3, 1, torch.Generator())
    with pytest.raises(DataError, match="num_bindings must be between 1 and num_values = 10, got 11"):
        rebinding_rows(SMALL, 8, 11, 1, torch.Generator())
    with pytest.raises(DataError, match="length must be at least 9 for 3 needles, got 8"):
        needle_rows(STACK, 8, 1, torch.Generator())
