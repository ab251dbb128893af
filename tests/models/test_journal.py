"""Taking tokens back: the cache is as if it had never seen them."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import sdm
from helpers import assert_close
from sdm.models.journal import Journal
from tiny_models import STACKS, tiny_config, tiny_model, tokens

Point = tuple[sdm.SDMCache, int]


def contents(cache: sdm.SDMCache) -> list[Tensor]:
    return [x for layer in cache.layers if layer.state for x in layer.state.trimmed().tensors().values()]


def same(cache: sdm.SDMCache, expected: sdm.SDMCache) -> None:
    assert cache.get_seq_length() == expected.get_seq_length()
    for x, y in zip(contents(cache), contents(expected), strict=True):
        assert torch.equal(x, y)


def without_journal(cache: sdm.SDMCache) -> sdm.SDMCache:
    twin = copy.deepcopy(cache)
    twin.use_journal(None)
    return twin


@torch.no_grad()
def exercise(model: sdm.SDMForCausalLM, seed: int, actions: int = 25) -> None:
    """Random steps, pieces, rewinds, forks and reorders, compared with copies of the cache made on the way."""
    draw, rows = random.Random(seed), 2
    torch.manual_seed(seed)
    cache = sdm.SDMCache(model.config)
    cache.record(tokens=200, nbytes=1 << 30)
    ids = torch.zeros(rows, 0, dtype=torch.int64)
    # What the cache was like after each call, with how many tokens, and whether all bits of it are known.
    points: list[tuple[sdm.SDMCache, int, Any, bool]] = []

    def read(count: int) -> None:
        nonlocal ids
        new = tokens(rows, count)
        model(new, past_key_values=cache)
        ids = torch.cat((ids, new), dim=1)
        points.append((without_journal(cache), ids.shape[1], cache.mark(), True))

    read(draw.randint(1, 9))
    for _ in range(actions):
        action = draw.choice(["step", "step", "piece", "piece", "mark", "crop", "part", "reorder", "fork"])
        if action == "step":
            read(1)
        elif action == "piece":
            read(draw.randint(2, 12))
        elif action in ("mark", "crop"):
            copied, length, mark, exact = points[draw.randrange(len(points))]
            if action == "mark":
                cache.rewind(mark)
            else:
                cache.crop(draw.choice([length, length - ids.shape[1]]))
            ids, points = ids[:, :length], [point for point in points if point[1] <= length]
            if exact:
                same(cache, copied)
            probe = tokens(rows, 1)
            expected = model(probe, past_key_values=copy.deepcopy(copied)).logits
            got = model(probe, past_key_values=without_journal(cache)).logits
            assert torch.equal(got, expected) if exact else torch.allclose(got, expected, rtol=1e-5, atol=1e-5)
        elif action == "part":
            length = draw.randint(points[0][1], ids.shape[1])
            cache.crop(length - ids.shape[1])
            ids, points = ids[:, :length], [point for point in points if point[1] <= length]
            fresh = sdm.SDMCache(model.config)
            model(ids, past_key_values=fresh)
            assert_close(contents(cache), contents(fresh), 1e-5)
            if points[-1][1] != length:
                points.append((without_journal(cache), length, cache.mark(), False))
        elif action == "reorder":
            source = torch.tensor([draw.randrange(rows) for _ in range(rows)])
            ids = ids[source]
            for one in [cache, *(point[0] for point in points)]:
                one.reorder_cache(source)
        else:
            cache = copy.deepcopy(cache)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("seed", range(2))
def test_random_rewinds(stack: str, seed: int) -> None:
    torch.manual_seed(seed)
    exercise(tiny_model(stack), seed)


@pytest.mark.slow
@pytest.mark.parametrize("stack", STACKS)
def test_many_random_rewinds(stack: str) -> None:
    """500 sequences over all stacks."""
    for seed in range(-(-500 // len(STACKS))):
        exercise(tiny_model(stack, sliding_window=random.Random(seed).choice([2, 5, 16])), 100 + seed, 15)


@pytest.mark.parametrize("stack", STACKS)
@torch.no_grad()
def test_parts_of_a_call(stack: str) -> None:
    """A piece longer than the window, of which any part is taken back, and then the rest."""
    model, ids = tiny_model(stack), tokens(1, 30)
    for removed in range(12):
        cache = sdm.SDMCache(model.config)
        model(ids[:, :18], past_key_values=cache)
        mark, before = cache.mark(), without_journal(cache)
        model(ids[:, 18:], past_key_values=cache)
        cache.crop(-removed)
        logits = model(ids[:, 30 - removed - 1 : 30 - removed + 2], past_key_values=without_journal(cache)).logits
        fresh = sdm.SDMCache(model.config)
        model(ids[:, : 30 - removed], past_key_values=fresh)
        assert_close(contents(cache), contents(fresh), 1e-5)
        expected = model(ids[:, 30 - removed - 1 : 30 - removed + 2], past_key_values=fresh).logits
        assert_close([logits], [expected], 1e-4)
        cache.rewind(mark)
        same(cache, before)


@pytest.mark.parametrize("stack", STACKS)
@torch.no_grad()
def test_padding(stack: str) -> None:
    model, first, ids = tiny_model(stack), tokens(2, 7), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3], mask[1, 9:] = 0, 0
    for removed in (1, 5, 10):
        cache, fresh = sdm.SDMCache(model.config), sdm.SDMCache(model.config)
        for one in (cache, fresh):
            model(first, past_key_values=one)
        mark, before = cache.mark(), without_journal(cache)
        got = model(ids, attention_mask=mask, past_key_values=cache).logits
        expected = model(ids, attention_mask=mask, past_key_values=copy.deepcopy(fresh)).logits
        assert_close([got[mask.bool()]], [expected[mask.bool()]], 1e-5)
        cache.crop(-removed)
        model(ids[:, :-removed], attention_mask=mask[:, :-removed], past_key_values=fresh)
        probe = tokens(2, 1)
        assert_close([model(probe, past_key_values=cache).logits], [model(probe, past_key_values=fresh).logits], 1e-4)
        cache.rewind(mark)
        same(cache, before)


@torch.no_grad()
def test_layers_that_cannot_replay() -> None:
    """Wrapped layers run without their in-place form: whole calls are taken back, parts are not."""
    model = tiny_model("mixed")
    cache = sdm.SDMCache(model.config)
    model(tokens(1, 5), past_key_values=cache)
    mark, before = cache.mark(), without_journal(cache)
    cache.layers[1]._steps = False
    model(tokens(1, 4), past_key_values=cache)
    after = without_journal(cache)
    with pytest.raises(ValueError, match="a layer that cannot replay tokens; take back 0 or 4"):
        cache.crop(-3)
    same(cache, after)
    cache.rewind(mark)
    same(cache, before)


@torch.no_grad()
def test_chunked_prefill_copies_no_table() -> None:
    model = tiny_model("sdm")
    cache = sdm.SDMCache(model.config)
    model(tokens(2, 7), past_key_values=cache)
    table = cache.layers[3].state.memory
    model(tokens(2, 7), past_key_values=cache)
    assert cache.layers[3].state.memory is table


@torch.no_grad()
def test_budget() -> None:
    model = tiny_model("sdm")
    cache = sdm.SDMCache(model.config)
    cache.record(tokens=10)
    model(tokens(1, 40), past_key_values=cache)
    assert cache.rewindable == 10
    for _ in range(30):
        model(tokens(1, 1), past_key_values=cache)
    assert cache.rewindable == 10
    one = cache.journal.nbytes // 10
    cache.record(tokens=10, nbytes=4 * one)
    model(tokens(1, 1), past_key_values=cache)
    assert cache.rewindable == 4
    assert cache.journal.nbytes <= 4 * one
    cache.record(tokens=10, nbytes=1)
    model(tokens(1, 1), past_key_values=cache)
    assert cache.rewindable == 0
    with pytest.raises(ValueError, match="tokens of a journal must be a positive integer"):
        cache.record(tokens=0)


@torch.no_grad()
def test_small_tables_are_copied_and_large_ones_are_not() -> None:
    for slots, whole in ((9, True), (400, False)):
        model = tiny_model("sdm", num_slots=slots)
        cache = sdm.SDMCache(model.config)
        cache.mark()
        model(tokens(1, 3), past_key_values=cache)
        rows = cache.journal.entries[-1].undo[3].rows
        assert rows.shape == ((1, 2, slots, 16) if whole else (1, 3, 2, 4, 16))


class TestBadInput:
    @torch.no_grad()
    def test_out_of_reach(self) -> None:
        model = tiny_model("mixed")
        cache = sdm.SDMCache(model.config)
        model(tokens(1, 20), past_key_values=cache)
        with pytest.raises(RuntimeError, match="nothing was recorded"):
            cache.crop(-1)
        early = cache.mark()
        cache.record(tokens=5)
        model(tokens(1, 9), past_key_values=cache)
        before = without_journal(cache)
        with pytest.raises(ValueError, match="take back 6 tokens: the journal reaches back 5, to a length of 24"):
            cache.crop(-6)
        with pytest.raises(ValueError, match="this cache can go back 5 of its 29 tokens"):
            cache.rewind(early)
        with pytest.raises(TypeError, match=r"mark must come from cache\.mark\(\)"):
            cache.rewind(3)  # type: ignore[arg-type]
        same(cache, before)
        cache.crop(0)
        cache.crop(100)
        same(cache, before)

    @torch.no_grad()
    def test_marks_of_others(self) -> None:
        model = tiny_model("sdm")
        caches = [sdm.SDMCache(model.config) for _ in range(2)]
        marks = [cache.mark() for cache in caches]
        for cache in caches:
            model(tokens(1, 4), past_key_values=cache)
        with pytest.raises(ValueError, match="of another cache"):
            caches[0].rewind(marks[1])
        later = caches[0].mark()
        caches[0].crop(-2)
        model(tokens(1, 2), past_key_values=caches[0])
        with pytest.raises(ValueError, match="taken back since"):
            caches[0].rewind(later)
        caches[0].rewind(marks[0])
        assert caches[0].get_seq_length() == 0

    def test_gradients(self) -> None:
        model = tiny_model("sdm")
        cache = sdm.SDMCache(model.config)
        with torch.no_grad():
            model(tokens(1, 4), past_key_values=cache)
            cache.mark()
            model(tokens(1, 4), past_key_values=cache)
        model(tokens(1, 4), past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match="the journal reaches back 0"):
            cache.crop(-4)
        for layer in cache.layers:
            layer.state = layer.state.map(lambda x: x.requires_grad_() if x.is_floating_point() else x)
        journal = cache.journal
        with torch.no_grad():
            for layer in cache.layers:
                journal.add(layer.place, 1, True, sdm.layers.state.Snapshot(layer.state))
        with pytest.raises(RuntimeError, match="while gradients are recorded"):
            cache.crop(-1)

    @torch.no_grad()
    def test_a_call_that_failed_on_its_way(self) -> None:
        model = tiny_model("sdm")
        cache = sdm.SDMCache(model.config)
        cache.mark()
        model(tokens(1, 4), past_key_values=cache)
        broken = model.model.layers[2].mixer
        broken.extend_, original = None, broken.extend_
        with pytest.raises(TypeError):
            model(tokens(1, 3), past_key_values=cache)
        broken.extend_ = original
        with pytest.raises(RuntimeError, match="failed on its way"):
            cache.crop(-1)

    def test_one_layer_alone(self) -> None:
        with pytest.raises(NotImplementedError, match="take back tokens together"):
            sdm.SDMCache(tiny_config()).layers[0].crop(-1)

    def test_a_journal_of_nothing(self) -> None:
        with pytest.raises(ValueError, match="nbytes of a journal must be a positive integer"):
            Journal(3, nbytes=0)
