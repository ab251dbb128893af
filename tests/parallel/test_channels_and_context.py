"""Models split by channels and by time give the numbers of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from processes import run_ranks
from sdm.parallel import ChannelShard, TimeSlice


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_split_models_are_the_whole_model(ranks: int) -> None:
    """Losses and all gradients, for every stack, in float64; see the script for what is compared."""
    printed = run_ranks(Path(__file__).parent / "split_ranks.py", ranks)
    assert all("checks" in text for text in printed), printed


def test_shards_are_the_same_stretch_of_every_head() -> None:
    whole = torch.arange(2 * 12 * 3).view(2, 12, 3)
    shards = [ChannelShard(1, 2, rank, 3) for rank in range(3)]
    parts = [shard.take(whole) for shard in shards]
    assert torch.equal(parts[1], whole[:, [2, 3, 8, 9]])
    assert torch.equal(shards[0].join(parts), whole)
    assert all(shard.full_shape(part.shape) == whole.shape for shard, part in zip(shards, parts, strict=True))


def test_time_slices_of_rows_that_ranks_do_not_divide() -> None:
    ids, targets, bounds = torch.arange(7).unsqueeze(0), torch.arange(1, 8).unsqueeze(0), torch.tensor([0, 4, 7])
    parts = [TimeSlice.of(ids, targets, bounds, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([part.input_ids for part in parts], 1)[:, :7], ids)
    wanted = torch.cat([part.targets for part in parts], 1)
    assert torch.equal(wanted[:, :7], targets)
    assert (wanted[:, 7:] == -100).all()
    assert parts[0].cu_seqlens is not None
    assert parts[0].cu_seqlens.tolist() == [0, 4, 7, 9]
