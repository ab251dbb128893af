"""The deterministic mode: prefill, pieces and steps give the same bits."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import sdm
from sdm.layers import deterministic
from tiny_models import STACKS, tiny_model, tokens


def logits(model: sdm.SDMForCausalLM, ids: Tensor, pieces: list[int]) -> Tensor:
    cache = sdm.SDMCache(model.config)
    with torch.no_grad(), deterministic():
        return torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(pieces, dim=1)], dim=1)


@pytest.mark.parametrize("width", [32, 48, 128])
@pytest.mark.parametrize("stack", STACKS)
def test_cuts_do_not_change_a_bit(stack: str, width: int) -> None:
    torch.manual_seed(width)
    model, ids, draw = tiny_model(stack, hidden_size=width, sliding_window=7), tokens(2, 45), random.Random(width)
    prefill = logits(model, ids, [45])
    with torch.no_grad():
        assert torch.allclose(prefill, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(model, ids, [1] * 45), prefill)
    for _ in range(2):
        first, second = sorted(draw.sample(range(1, 44), 2))
        assert torch.equal(logits(model, ids, [first, second - first, 45 - second]), prefill)
    assert torch.equal(logits(model, ids[:1], [20, 25]), prefill[:1]), "nor do the rows beside it"


def test_generated_tokens_have_the_logits_of_a_prefill() -> None:
    model, ids = tiny_model("mixed"), tokens(1, 9)
    with deterministic():
        out = model.generate(
            ids,
            max_new_tokens=12,
            do_sample=True,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=None,
            attention_mask=torch.ones_like(ids),
        )
    again = logits(model, out.sequences, [21])
    assert torch.equal(torch.stack(out.logits, dim=1), again[:, 8:20])


def test_padding_is_refused() -> None:
    model, ids = tiny_model("sdm"), tokens(2, 5)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with torch.no_grad(), deterministic(), pytest.raises(ValueError, match="rows without padding"):
        model(ids, attention_mask=mask)
