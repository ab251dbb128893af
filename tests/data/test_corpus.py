from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdm.data import IGNORED, Batch, Batches, Corpus, CorpusConfig, DataError, open_data
from sdm.data.corpus import BLOCK, Mixture, shares

EOS = 256


@pytest.fixture
def config(tmp_path: Path) -> CorpusConfig:
    for name, letter, count in (("a", "a", 40), ("b", "b", 25)):
        (tmp_path / name).mkdir()
        for i in range(count):
            (tmp_path / name / f"{i:03d}.txt").write_text(letter * (5 + 7 * i % 60))
    return CorpusConfig(
        sources=(str(tmp_path / "a"), str(tmp_path / "b")),
        weights=(3, 1),
        sequence_length=32,
        batch_size=8,
        valid_fraction=0.2,
        cache_dir=tmp_path / "cache",
    )


def gather(batch: Batch, per_row: int = 32) -> list[tuple[list[int], list[int]]]:
    inputs, targets = batch.input_ids.view(-1, per_row), batch.targets.view(-1, per_row)
    return list(zip(inputs.tolist(), targets.tolist(), strict=True))


@pytest.mark.parametrize("layout", ["packed", "rows", "stream"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_share_the_same_global_batch(config: CorpusConfig, layout: str, world_size: int) -> None:
    source = open_data(dataclasses.replace(config, layout=layout))
    alone = Batches(source, step=5)
    ranks = [Batches(source, rank, world_size, step=5) for rank in range(world_size)]
    for _ in range(3):
        whole = next(alone)
        parts = [next(rank) for rank in ranks]
        rows = [gather(part) for part in parts]
        assert [row for part in rows for row in part] == gather(whole)
        if whole.reset is not None:
            resets = [part.reset.tolist() for part in parts if part.reset is not None]
            assert [reset for part in resets for reset in part] == whole.reset.tolist()


@pytest.mark.parametrize("layout", ["packed", "rows", "stream"])
def test_resuming_continues_exactly(config: CorpusConfig, layout: str) -> None:
    config = dataclasses.replace(config, layout=layout)
    unbroken = Batches(open_data(config))
    for _ in range(13):  # past the first epoch
        next(unbroken)
    state = unbroken.state_dict()
    resumed = Batches(open_data(config), rank=1, world_size=2)
    resumed.load_state_dict(state)
    for _ in range(3):
        expected, batch = next(unbroken), next(resumed)
        assert gather(batch) == gather(expected)[4:]


def test_packed_batches_keep_documents_apart(config: CorpusConfig) -> None:
    batch = next(Batches(open_data(config)))
    assert batch.cu_seqlens is not None
    assert batch.input_ids.shape == (1, 8 * 32)
    bounds = batch.cu_seqlens.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == 8 * 32
    assert set(range(0, 8 * 32, 32)) <= set(bounds)
    for start, stop in pairwise(bounds):
        piece = batch.input_ids[0, start:stop]
        assert len(set(piece.tolist()) - {EOS}) <= 1
        assert (piece[1:] != EOS).all() or batch.targets[0, start] == IGNORED


def test_rows_are_the_packed_tokens_as_a_matrix(config: CorpusConfig) -> None:
    packed = next(Batches(open_data(config)))
    rows = next(Batches(open_data(dataclasses.replace(config, layout="rows"))))
    assert rows.cu_seqlens is None
    assert rows.input_ids.shape == (8, 32)
    assert torch.equal(rows.input_ids.view(1, -1), packed.input_ids)
    assert torch.equal(rows.targets.view(1, -1), packed.targets)


def test_weights_decide_the_mixture(config: CorpusConfig) -> None:
    batches = Batches(open_data(config))
    tokens = torch.cat([next(batches).input_ids.flatten() for _ in range(128)])
    share = (tokens == ord("a")).sum() / ((tokens == ord("a")) | (tokens == ord("b"))).sum()
    assert abs(share - 0.75) < 0.03


def test_streams_give_each_source_its_rows(config: CorpusConfig) -> None:
    batches = Batches(open_data(dataclasses.replace(config, layout="stream")))
    for _ in range(20):
        batch = next(batches)
        assert not (batch.input_ids[:6] == ord("b")).any()
        assert not (batch.input_ids[6:] == ord("a")).any()
        assert batch.reset is not None
        # What continues a document does not start one.
        assert ((batch.input_ids[:, 0] == EOS) <= batch.reset).all()


@pytest.mark.parametrize("layout", ["packed", "rows", "stream"])
def test_held_out_text_comes_once(config: CorpusConfig, layout: str) -> None:
    source = open_data(dataclasses.replace(config, layout=layout), "valid")
    assert isinstance(source, Corpus)
    batches = list(Batches(source))
    assert len(batches) == source.num_steps
    assert sum(batch.num_targets for batch in batches) == sum(store.num_tokens for store in source.stores)


def test_changed_data_is_noticed(config: CorpusConfig, tmp_path: Path) -> None:
    state = Batches(open_data(config)).state_dict()
    for changed in ({"seed": 1}, {"batch_size": 4}, {"layout": "rows"}, {"weights": (1, 1)}, {"sequence_length": 16}):
        with pytest.raises(DataError, match="the data changed"):
            Batches(open_data(dataclasses.replace(config, **changed))).load_state_dict(state)  # type: ignore[arg-type]
    (tmp_path / "a" / "000.txt").write_text("changed")
    with pytest.raises(DataError, match="the data changed"):
        Batches(open_data(config)).load_state_dict(state)


def test_what_cannot_be_laid_out(config: CorpusConfig) -> None:
    with pytest.raises(DataError, match="batch_size = 1 leaves no row for source"):
        open_data(dataclasses.replace(config, layout="stream", batch_size=1))
    with pytest.raises(DataError, match=r"tokens in split 'train', fewer than one sequence of sequence_length"):
        open_data(dataclasses.replace(config, sequence_length=10**6))
    assert next(Batches(open_data(dataclasses.replace(config, sequence_length=10**5), "valid"))).num_targets > 0
    with pytest.raises(DataError, match="split must be one of train, valid, test"):
        open_data(config, "held-out")
    with pytest.raises(DataError, match="divisible by world_size = 3"):
        Batches(open_data(config), 0, 3)
    with pytest.raises(DataError, match="rank must be"):
        Batches(open_data(config), 2, 2)


def test_the_built_in_code(tmp_path: Path) -> None:
    source = open_data(CorpusConfig(cache_dir=tmp_path, sequence_length=256, batch_size=2), "test")
    batch = next(Batches(source))
    assert batch.num_targets == 512
    assert source.vocab_size == 257


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
