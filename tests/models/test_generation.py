"""Decoding with a cache gives what the whole sequence gives, however the tokens are fed."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import sdm
from helpers import assert_close, assert_identical
from tiny_models import STACKS, tiny_config, tiny_model, tokens


@pytest.fixture(params=STACKS)
def model(request: pytest.FixtureRequest) -> sdm.SDMForCausalLM:
    return tiny_model(request.param)


@pytest.mark.parametrize("pieces", [[23], [1] * 23, [4, 1, 1, 9, 1, 7], [22, 1], [1, 22]])
@torch.no_grad()
def test_cached_is_uncached(model: sdm.SDMForCausalLM, pieces: list[int]) -> None:
    ids = tokens(3, 23)
    cache = sdm.SDMCache(model.config)
    outputs = [model(piece, past_key_values=cache, use_cache=True).logits for piece in ids.split(pieces, dim=1)]
    assert_close([torch.cat(outputs, dim=1)], [model(ids, use_cache=False).logits], 1e-5)
    assert cache.get_seq_length() == 23


def test_cached_is_uncached_with_gradients(model: sdm.SDMForCausalLM) -> None:
    """Gradients flow through the cache: the pieces are one sequence."""
    ids = tokens(2, 9)
    gradients = []
    for pieces in ([9], [4, 1, 4]):
        cache = sdm.SDMCache(model.config)
        model.zero_grad()
        logits = [model(piece, past_key_values=cache, use_cache=True).logits for piece in ids.split(pieces, dim=1)]
        torch.cat(logits, dim=1).square().mean().backward()
        gradients.append([x.grad.clone() for x in model.parameters()])
    assert_close(gradients[1], gradients[0], 1e-4)


def test_greedy(model: sdm.SDMForCausalLM) -> None:
    ids = tokens(3, 6)
    expected = ids
    with torch.no_grad():
        for _ in range(14):
            best = model(expected, use_cache=False).logits[:, -1:].argmax(-1)
            expected = torch.cat([expected, best], dim=1)
    assert_identical([model.generate(ids, max_new_tokens=14, do_sample=False)], [expected])


def test_sampling(model: sdm.SDMForCausalLM) -> None:
    ids = tokens(2, 6)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        results.append(model.generate(ids, max_new_tokens=10, do_sample=True, top_k=5, use_cache=use_cache))
    assert_identical(results[:1], results[1:])


def test_beam_search(model: sdm.SDMForCausalLM) -> None:
    ids = tokens(2, 6)
    options = {"max_new_tokens": 10, "num_beams": 4, "num_return_sequences": 3, "do_sample": False}
    assert_identical([model.generate(ids, **options)], [model.generate(ids, **options, use_cache=False)])


def test_chunked_prefill(model: sdm.SDMForCausalLM) -> None:
    ids = tokens(2, 23)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    for size in (1, 4, 22):
        actual = model.generate(ids, max_new_tokens=6, do_sample=False, prefill_chunk_size=size)
        assert_identical([actual], [expected])


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 3}, {"num_beams": 3}], ids=str)
def test_left_padded_batch(model: sdm.SDMForCausalLM, options: dict[str, int]) -> None:
    """A row's output is that of the row alone."""
    rows = [tokens(1, length) for length in (11, 3, 7)]
    padded, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
    for row, ids in enumerate(rows):
        padded[row, 11 - ids.shape[1] :], mask[row, 11 - ids.shape[1] :] = ids, 1
    together = model.generate(padded, attention_mask=mask, max_new_tokens=9, do_sample=False, **options)
    for row, ids in enumerate(rows):
        alone = model.generate(ids, max_new_tokens=9, do_sample=False, **options)
        assert_identical([together[row, -9:]], [alone[0, -9:]])


@torch.no_grad()
def test_padding_between_pieces(model: sdm.SDMForCausalLM) -> None:
    """Two turns of a conversation, each padded on its own side: the cache sees the valid tokens only."""
    first, second = [tokens(1, n) for n in (5, 2)], [tokens(1, n) for n in (3, 6)]
    cache = sdm.SDMCache(model.config)
    for turn, width in ((first, 5), (second, 6)):
        padded, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width)
        for row, ids in enumerate(turn):
            padded[row, : ids.shape[1]], mask[row, : ids.shape[1]] = ids, 1
        logits = model(padded, attention_mask=mask, past_key_values=cache).logits
    for row in range(2):
        alone = model(torch.cat([first[row], second[row]], dim=1)).logits[:, first[row].shape[1] :]
        assert_close([logits[row : row + 1, : second[row].shape[1]]], [alone], 1e-5)


def test_continuing_a_conversation(model: sdm.SDMForCausalLM) -> None:
    """`generate` on a filled cache, given the whole stream again as transformers expects it."""
    cache = sdm.SDMCache(model.config)
    ids = tokens(1, 5)
    for _ in range(3):
        stream = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert_identical([stream], [model.generate(ids, max_new_tokens=4, do_sample=False)])
        ids = torch.cat([stream, tokens(1, 3)], dim=1)


@torch.no_grad()
def test_decoding_is_in_place_and_windows_stay_small() -> None:
    model = tiny_model("sdm")
    cache = model(tokens(2, 12), use_cache=True).past_key_values
    table = cache.layers[3].state.memory
    size = cache.nbytes
    for _ in range(5):
        model(tokens(2, 1), past_key_values=cache)
    assert cache.layers[3].state.memory is table
    assert cache.nbytes == size
    assert cache.layers[0].state.key.shape[2] == model.config.sliding_window


@torch.no_grad()
def test_reordering_copies_only_what_moves() -> None:
    model = tiny_model("sdm")
    cache = model(tokens(3, 12), use_cache=True).past_key_values
    table = cache.layers[3].state.memory
    before = table.clone()
    cache.reorder_cache(torch.tensor([0, 0, 2]))
    assert cache.layers[3].state.memory is table
    assert_identical([table], [before[[0, 0, 2]]])
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert_identical([table], [before[[2, 0, 0]]])
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 6
    cache.batch_select_indices(torch.tensor([5, 0]))
    assert_identical([cache.layers[3].state.memory], [before[[0, 2]]])
    cache.reset()
    assert (cache.batch_size, cache.get_seq_length(), cache.nbytes) == (-1, 0, 0)


def test_inference_mode_and_no_grad_mix() -> None:
    model, ids = tiny_model("mixed"), tokens(1, 9)
    with torch.inference_mode():
        cache = model(ids[:, :8], use_cache=True).past_key_values
    with torch.no_grad():
        logits = model(ids[:, 8:], past_key_values=cache).logits
        assert_close([logits], [model(ids).logits[:, 8:]], 1e-5)


class TestBadInput:
    def test_another_cache(self) -> None:
        model = tiny_model()
        with pytest.raises(TypeError, match=r"past_key_values must be an sdm\.SDMCache, got DynamicCache"):
            model.generate(tokens(1, 4), past_key_values=DynamicCache(), max_new_tokens=2)
        with pytest.raises(ValueError, match="cache_implementation"):
            model.generate(tokens(1, 4), cache_implementation="static", max_new_tokens=2)

    @torch.no_grad()
    def test_another_batch(self) -> None:
        model = tiny_model()
        cache = model(tokens(2, 4), use_cache=True).past_key_values
        with pytest.raises(ValueError, match="past_key_values holds 2 rows, but the input has 3"):
            model(tokens(3, 1), past_key_values=cache)


def test_use_cache_follows_the_configuration() -> None:
    model = tiny_model()
    with torch.no_grad():
        assert isinstance(model(tokens(1, 3)).past_key_values, sdm.SDMCache)
    assert model(tokens(1, 3)).past_key_values is None, "no state is kept while gradients are recorded"
    assert tiny_config(use_cache=False).use_cache is False


def test_a_cache_of_another_model_is_refused_before_it_changes() -> None:
    ours, theirs = tiny_model(), tiny_model(num_slots=36)
    cache = sdm.SDMCache(theirs.config)
    with torch.no_grad():
        theirs(tokens(1, 4), past_key_values=cache)
        for length in (1, 3):
            with pytest.raises(ValueError, match="past_key_values is of another model: its num_slots is 36"):
                ours(tokens(1, length), past_key_values=cache)
    assert [layer.length for layer in cache.layers] == [4] * 4


@pytest.mark.parametrize("name", ["hybrid", "static", "offloaded", "quantized"])
def test_other_caches_are_refused(name: str) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=f"cache_implementation = '{name}' is not available"):
        model.generate(tokens(1, 4), max_new_tokens=2, cache_implementation=name)
    given = GenerationConfig(max_new_tokens=2, cache_implementation=name)
    with pytest.raises(ValueError, match=f"cache_implementation = '{name}' is not available"):
        model.generate(tokens(1, 4), generation_config=given)


def test_tokens_that_the_cache_has_seen() -> None:
    model, ids = tiny_model(), tokens(1, 10)
    cache = sdm.SDMCache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values has seen 10 tokens"):
        model.generate(ids, past_key_values=cache, max_new_tokens=3)
