"""Taking tokens away from a model: exact where it can be told, and what S names is what the answer rests on."""

from __future__ import annotations

import pytest
import torch

import sdm
from sdm.analysis import forget_tokens, mask_writes, trace
from tiny_models import STACKS, recalling_model, tiny_model, tokens


def recall_text(pairs: int = 12, asked: int = 5) -> tuple[torch.Tensor, int]:
    """Keys 0, 2, 4 ..., each followed by its value, and one key again; the place of the value that it asks for."""
    generator = torch.Generator().manual_seed(0)
    values = 40 + torch.randperm(40, generator=generator)[:pairs]
    text = torch.stack((2 * torch.arange(pairs), values), dim=1).flatten()
    return torch.cat((text, text[2 * asked : 2 * asked + 1])), 2 * asked + 1


def test_the_pair_that_the_map_names_carries_the_answer() -> None:
    model = recalling_model(80)
    ids, true_pair = recall_text()
    layer = trace(model, ids).layers[0]
    (source, weight), *others = layer.sources(len(ids) - 1)
    assert source == true_pair
    assert abs(weight) > 0.999 * sum(abs(x) for _, x in (*others, (source, weight)))
    answer = int(ids[true_pair])
    named = mask_writes(model, ids, [true_pair])
    assert int(named.before[0].argmax()) == answer
    assert int(named.after[0].argmax()) != answer
    assert float(named.change[0]) > 0.5
    for other in range(1, len(ids) - 1, 2):
        if other != true_pair:
            removed = mask_writes(model, ids, [other])
            assert int(removed.after[0].argmax()) == answer
            assert float(removed.change[0]) < 1e-6


def test_forgetting_a_pair() -> None:
    model = recalling_model(80)
    ids, true_pair = recall_text()
    answer = int(ids[true_pair])
    assert int(forget_tokens(model, ids, [true_pair - 1, true_pair]).after[0].argmax()) != answer
    assert int(forget_tokens(model, ids, [true_pair + 1, true_pair + 2]).after[0].argmax()) == answer


@pytest.mark.parametrize("stack", STACKS)
@torch.no_grad()
def test_forgetting_equals_never_having_seen(stack: str) -> None:
    model, ids = tiny_model(stack), tokens(1, 14)
    removed, places = [3, 4, 9], [12, 1, 13, 5]
    left = [t for t in range(14) if t not in removed]
    result = forget_tokens(model, ids, removed, places=places)
    whole = model(ids).logits[0].log_softmax(-1)
    never = model(ids[:, left]).logits[0].log_softmax(-1)
    torch.testing.assert_close(result.before, whole[places], rtol=0, atol=1e-5)
    torch.testing.assert_close(result.after, never[[left.index(t) for t in places]], rtol=0, atol=1e-5)


@torch.no_grad()
def test_forgetting_equals_that_of_a_state() -> None:
    """The state whose span was forgotten says what the text without the span says."""
    model, ids = tiny_model("sdm"), tokens(1, 12)
    cache = sdm.SDMCache(model.config)
    cache.record()
    model(ids[:, :-1], past_key_values=cache)
    state = sdm.MemoryState.from_cache(model, cache).forget(model, (4, 6), ids[0, 6:11].tolist())
    said = model(ids[:, -1:], past_key_values=state.cache(model)).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(forget_tokens(model, ids, [4, 5]).after[0], said, rtol=0, atol=1e-5)


def test_a_masked_write_of_one_layer_is_that_of_its_trace() -> None:
    """Of a model of a single memory, whose later tokens see nothing else of the masked token."""
    model = tiny_model(layer_types=["sdm"], num_hidden_layers=1)
    ids = tokens(20)
    layer = trace(model, ids).layers[0]
    changed = (layer.without([6]) - layer.reads.readings[0]).abs().amax((1, 2)) > 1e-6
    result = mask_writes(model, ids, [6], places=range(20))
    assert torch.equal((result.before - result.after).abs().amax(-1) > 1e-6, changed)
    assert bool(changed.any())


@pytest.mark.parametrize("stack", ["sdm", "gdn", "mamba2", "shifted"])
@torch.no_grad()
def test_masked_writes_behind_a_state(stack: str) -> None:
    model, ids = tiny_model(stack), tokens(1, 12)
    cache = sdm.SDMCache(model.config)
    model(ids[:, :5], past_key_values=cache)
    state = sdm.MemoryState.from_cache(model, cache)
    whole = mask_writes(model, ids, [7], places=range(5, 12))
    onward = mask_writes(model, ids[:, 5:], [2], state=state, places=range(7))
    torch.testing.assert_close(onward.before, whole.before, rtol=0, atol=1e-5)
    torch.testing.assert_close(onward.after, whole.after, rtol=0, atol=1e-5)
    assert float(whole.change[-1]) > 1e-7
    nothing = mask_writes(model, ids, [])
    assert torch.equal(nothing.before, nothing.after)
    single = mask_writes(model, ids[:, 5:6], [0], state=state)
    assert bool(single.after.isfinite().all())


def test_bad_input() -> None:
    model, ids = tiny_model("mixed"), tokens(8)
    with pytest.raises(ValueError, match=r"layers must be blocks with a memory, which are \[3\], got \[0\]"):
        mask_writes(model, ids, [1], layers=[0])
    with pytest.raises(ValueError, match="blocks with a memory"):
        mask_writes(tiny_model("full_attention"), ids, [1])
    with pytest.raises(IndexError, match=r"tokens must lie in \[0, 8\)"):
        mask_writes(model, ids, [8])
    with pytest.raises(IndexError, match="places must lie"):
        forget_tokens(model, ids, [1], places=[-1])
    with pytest.raises(ValueError, match="must not be forgotten"):
        forget_tokens(model, ids, [1], places=[1])
    with pytest.raises(ValueError, match="must leave some"):
        forget_tokens(model, ids, range(8))
    with pytest.raises(ValueError, match="one text"):
        forget_tokens(model, tokens(2, 8), [1])
    with pytest.raises(TypeError, match="SDMForCausalLM"):
        forget_tokens(torch.nn.Linear(2, 2), ids, [1])
