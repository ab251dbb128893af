"""Assisted and prompt-lookup decoding of transformers: the tokens of plain greedy decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sdm
from tiny_models import STACKS, VOCABULARY, tiny_model

ALL_STACKS = list(STACKS)
SIX = ["sdm", "full_attention", "gdn", "mamba2", "mixed", "shifted"]


def repeating(draw: torch.Generator, length: int) -> torch.Tensor:
    """A prompt in which a lookup finds something: a few words, again and again."""
    words = torch.randint(VOCABULARY, (4, 3), generator=draw)
    return words[torch.randint(4, (length,), generator=draw)].reshape(1, -1)[:, :length]


def check(model: sdm.SDMForCausalLM, assistant: sdm.SDMForCausalLM, prompts: int, seed: int = 0) -> None:
    draw = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    for number in range(prompts):
        prompt = repeating(draw, int(torch.randint(1, 90, (1,), generator=draw)))
        options["attention_mask"] = torch.ones_like(prompt)
        if number % 3 == 2:  # left padding
            options["attention_mask"][:, : prompt.shape[1] // 3] = 0
        expected = model.generate(prompt, **options)
        lookup = model.generate(prompt, prompt_lookup_num_tokens=1 + number % 7, max_matching_ngram_size=2, **options)
        assert torch.equal(lookup, expected)
        assisted = model.generate(prompt, assistant_model=assistant, num_assistant_tokens=1 + number % 5, **options)
        assert torch.equal(assisted, expected)


@pytest.mark.parametrize("stack", ALL_STACKS)
def test_greedy_tokens_are_the_same(stack: str) -> None:
    torch.manual_seed(1)
    model, assistant = tiny_model(stack), tiny_model("sdm", hidden_size=16, num_memory_heads=1)
    check(model, assistant, prompts=3)


@pytest.mark.slow
@pytest.mark.parametrize("window", [2, 5, 40])
@pytest.mark.parametrize("stack", SIX)
def test_greedy_tokens_are_the_same_for_many_prompts(stack: str, window: int) -> None:
    torch.manual_seed(2)
    model = tiny_model(stack, sliding_window=window)
    check(model, tiny_model("gdn", hidden_size=16), prompts=-(-200 // 18), seed=window)


def test_drafts_are_accepted() -> None:
    """A model that drafts for itself is never corrected: the target model is called less often than once a token."""
    torch.manual_seed(3)
    model = tiny_model("mixed")
    calls: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: calls.append(inputs[0].shape[1]))
    prompt = torch.arange(6)[None]
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    model.generate(prompt, **options)
    plain = len(calls)
    calls.clear()
    twin = tiny_model("mixed")
    twin.load_state_dict(model.state_dict())
    model.generate(prompt, assistant_model=twin, num_assistant_tokens=5, **options)
    assert plain == 24
    assert len(calls) <= 12


def test_the_cache_continues_after_assisted_decoding() -> None:
    torch.manual_seed(4)
    model = tiny_model("sdm")
    prompt = repeating(torch.Generator().manual_seed(0), 30)
    options = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0}
    cache = sdm.SDMCache(model.config)
    result = model.generate(prompt, prompt_lookup_num_tokens=4, past_key_values=cache, **options)
    assert cache.get_seq_length() == result.shape[1] - 1
    with torch.no_grad():
        continued = model(result[:, -1:], past_key_values=cache).logits[:, -1]
        whole = model(result, use_cache=False).logits[:, -1]
    assert torch.allclose(continued, whole, atol=1e-4)
