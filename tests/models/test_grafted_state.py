"""States of grafted models: taken, continued, forked, saved, loaded; marks; and a graft that learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, PreTrainedModel

import sdm
from grafted_bases import gemma3, gpt2, llama, mistral, qwen3_next, tokens, trained
from sdm import MemoryState

BASES = pytest.mark.parametrize("build", [llama, mistral, gemma3, gpt2], ids=lambda build: build.__name__)
OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"kind": "gdn"}, {"learned_initial_state": False}],
    ids=["sdm", "gdn", "zeros"],
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def read(model: Any, ids: Tensor, cache: Any) -> Tensor:
    return model(ids, past_key_values=cache, use_cache=True).logits


@BASES
@OPTIONS
@torch.no_grad()
def test_a_state_continues_where_the_stream_was(
    build: Callable[[], PreTrainedModel], options: dict[str, Any], tmp_path: Path
) -> None:
    model, ids = trained(build(), **options), tokens(1)
    cache = model.new_cache()
    read(model, ids[:, :11], cache)
    state = MemoryState.from_cache(model, cache)
    expected = read(model, ids[:, 11:], cache)
    assert len(state) == 11
    state.save(tmp_path / "state.sdm")
    loaded = MemoryState.load(tmp_path / "state.sdm", model)
    for taken in (state, state.fork(), loaded):
        again = taken.cache(model)
        assert again.get_seq_length() == 11
        assert torch.equal(read(model, ids[:, 11:], again), expected)
    twice = read(model, ids[:, 11:].repeat(2, 1), state.cache(model, batch_size=2))
    torch.testing.assert_close(twice, expected.repeat(2, 1, 1))


@torch.no_grad()
def test_windows_and_sinks_are_part_of_a_state(tmp_path: Path) -> None:
    model, ids = trained(llama(), attention_window=5, attention_sinks=2), tokens(1)
    cache = model.new_cache()
    read(model, ids[:, :11], cache)
    state = MemoryState.from_cache(model, cache)
    expected = read(model, ids[:, 11:], cache)
    state.save(tmp_path / "state.sdm")
    loaded = MemoryState.load(tmp_path / "state.sdm", model)
    torch.testing.assert_close(read(model, ids[:, 11:], loaded.cache(model)), expected)
    assert state.cache(model).layers[0].keys.shape[2] == 6  # two sinks and a window less the token to come


@torch.no_grad()
def test_a_row_of_a_batch_and_what_differs() -> None:
    model, ids = trained(llama()), tokens(2)
    cache = model.new_cache()
    read(model, ids[:, :11], cache)
    with pytest.raises(ValueError, match="row must say"):
        MemoryState.from_cache(model, cache)
    first, second = (MemoryState.from_cache(model, cache, row=row) for row in (0, 1))
    expected = read(model, ids[:, 11:], cache)
    torch.testing.assert_close(read(model, ids[1:, 11:], second.cache(model)), expected[1:])
    changes = first.diff(second)
    assert set(changes) == {3, 4}  # behind the attention of three blocks, the two memories
    assert all(len(change) for change in changes.values())


@torch.no_grad()
def test_generation_goes_on_from_a_state() -> None:
    model, ids = trained(mistral()), tokens(1)
    cache = model.new_cache()
    read(model, ids[:, :-1], cache)
    state = MemoryState.from_cache(model, cache)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    again = model.generate(
        ids, past_key_values=state.cache(model), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert torch.equal(again, expected)


@torch.no_grad()
def test_states_of_other_models_and_caches_are_refused(tmp_path: Path) -> None:
    model, ids = trained(llama()), tokens(1)
    cache = model.new_cache()
    with pytest.raises(ValueError, match="empty"):
        MemoryState.from_cache(model, cache)
    read(model, ids, cache)
    state = MemoryState.from_cache(model, cache)
    state.save(tmp_path / "state.sdm")
    other = trained(llama())
    with pytest.raises(ValueError, match="weights differ"):
        state.cache(other)
    with pytest.raises(ValueError, match="weights differ"):
        MemoryState.load(tmp_path / "state.sdm", other)
    with pytest.raises(ValueError, match=r"graft\.layers"):
        state.cache(trained(llama(), layers=[0]))
    with pytest.raises(ValueError, match="is of another model"):
        MemoryState.load(tmp_path / "state.sdm", trained(gpt2()))
    with pytest.raises(ValueError, match=r"model\.mark"):
        state.rewind(model, 2)
    hybrid = trained(qwen3_next())
    cache = DynamicCache(config=hybrid.config)
    read(hybrid, ids, cache)
    with pytest.raises(TypeError, match="whose blocks all have"):
        MemoryState.from_cache(hybrid, cache)


@BASES
@OPTIONS
@torch.no_grad()
def test_rewinding_to_a_mark(build: Callable[[], PreTrainedModel], options: dict[str, Any]) -> None:
    model, ids = trained(build(), **options), tokens(2)
    cache = model.new_cache()
    read(model, ids[:, :9], cache)
    mark = model.mark(cache)
    expected = read(model, ids[:, 9:14], cache)
    read(model, ids[:, 14:15], cache)
    model.rewind(cache, mark)
    assert cache.get_seq_length() == 9
    torch.testing.assert_close(read(model, ids[:, 9:14], cache), expected)


@torch.no_grad()
def test_a_mark_out_of_reach_changes_nothing() -> None:
    model, ids = trained(mistral()), tokens(1)
    cache = model.new_cache()
    early = model.mark(cache)
    read(model, ids[:, :9], cache)
    mark = model.mark(cache)
    read(model, ids[:, 9:12], cache)
    model.rewind(cache, mark)  # windows drop what is no longer needed
    with pytest.raises(ValueError, match="dropped keys"):
        model.rewind(cache, early)
    whole = model(ids[:, :14]).logits[:, 9:]
    torch.testing.assert_close(read(model, ids[:, 9:14], cache), whole)
    with pytest.raises(ValueError, match="another cache"):
        model.rewind(model.new_cache(), mark)


@torch.no_grad()
def test_a_full_window_takes_back_what_was_recorded() -> None:
    model, ids = trained(llama(), attention_window=5, attention_sinks=1), tokens(2)
    cache = model.new_cache()
    read(model, ids[:, :9], cache)
    mark = model.mark(cache)
    expected = read(model, ids[:, 9:], cache)
    model.rewind(cache, mark)
    torch.testing.assert_close(read(model, ids[:, 9:], cache), expected)


@pytest.mark.parametrize("kind", ["sdm", "gdn"])
@torch.no_grad()
def test_pieces_steps_padding_packing_and_beams(kind: str) -> None:
    model, ids = trained(mistral(), kind=kind), tokens(2)
    whole = model(ids).logits
    cache = model.new_cache()
    pieces = [read(model, part, cache) for part in ids.split((7, 1, 1, 9), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-5, rtol=1e-5)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    alone = model(ids[:1, 5:]).logits
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[:1, 5:], alone, atol=1e-5, rtol=1e-5)
    positions = torch.cat((torch.arange(8), torch.arange(10)))[None]
    packed = model(ids[:1], position_ids=positions, use_cache=False).logits
    parts = torch.cat((model(ids[:1, :8]).logits, model(ids[:1, 8:]).logits), 1)
    torch.testing.assert_close(packed, parts, atol=1e-5, rtol=1e-5)
    options = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    beams = model.generate(ids[:1], **options)
    assert torch.equal(beams, model.generate(ids[:1], **options, use_cache=False))


def test_a_frozen_graft_learns_what_its_base_cannot_see() -> None:
    """The second half of a row repeats the first, beyond the window of the base."""
    length, sizes = 16, {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = MistralForCausalLM(MistralConfig(vocab_size=24, num_key_value_heads=2, sliding_window=4, **sizes))

    def loss(model: Any) -> Tensor:
        ids = torch.rand(16, 24).argsort(1)[:, :length].repeat(1, 2)
        logits = model(ids, use_cache=False).logits[:, length:-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, length + 1 :].flatten())

    def train(model: Any, steps: int, lr: float) -> None:
        optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=lr, weight_decay=0.0)
        for _ in range(steps):
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(base, 60, 3e-3)
    with torch.no_grad():
        before = sum(float(loss(base)) for _ in range(4)) / 4
    weights = {name: x.clone() for name, x in base.named_parameters()}
    model: Any = sdm.graft(base)
    train(model, 150, 1e-2)
    with torch.no_grad():
        after = sum(float(loss(model)) for _ in range(4)) / 4
    assert before > 2.5  # nothing but the tokens nearby: at best, one of those that were not seen just before
    assert after < before - 0.5
    sdm.ungraft(model)
    assert all(torch.equal(x, weights[name]) for name, x in base.named_parameters())
