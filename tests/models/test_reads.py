"""`output_attentions=True`: maps of every mixer, whole and behind a cache, padded, and in `generate`."""

from __future__ import annotations

import pytest
import torch

import sdm
from helpers import assert_identical
from sdm.layers.reads import has_reads
from sdm.models import reads
from tiny_models import STACKS, tiny_model, tokens


def is_attention(layer_type: str) -> bool:
    return layer_type.endswith("attention")


@pytest.mark.parametrize("stack", STACKS)
def test_maps_of_every_stack(stack: str) -> None:
    model, ids = tiny_model(stack), tokens(2, 9)
    with torch.no_grad():
        plain, output = model(ids), model(ids, output_attentions=True)
    assert_identical([output.logits], [plain.logits])
    assert plain.attentions is None
    assert len(output.attentions) == model.config.num_hidden_layers
    for block, weights in zip(model.model.layers, output.attentions, strict=True):
        heads = weights.shape[1]
        assert weights.shape == (2, heads, 9, 9)
        assert (heads > 0) == has_reads(block.mixer)
        assert not weights.triu(1).any()
        if is_attention(block.layer_type):
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, heads, 9))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("stack", ["sdm", "gdn", "full_attention", "shifted", "mixed"])
@torch.no_grad()
def test_behind_a_cache(stack: str, padded: bool) -> None:
    """Attention names every token before, also behind padding; a memory knows the tokens of this call only."""
    model, ids, mask = tiny_model(stack), tokens(2, 12), torch.ones(2, 12, dtype=torch.int64)
    if padded:
        mask[1, :3] = 0
    whole = model(ids, attention_mask=mask, output_attentions=True).attentions
    cache = sdm.SDMCache(model.config)
    model(ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache)
    onward = model(ids[:, 8:], attention_mask=mask, past_key_values=cache, output_attentions=True).attentions
    for block, full, late in zip(model.model.layers, whole, onward, strict=True):
        assert late.shape == (2, full.shape[1], 4, 12)
        torch.testing.assert_close(late[..., 8:], full[:, :, 8:, 8:], rtol=1e-4, atol=1e-5)
        if is_attention(block.layer_type):
            torch.testing.assert_close(late[..., :8], full[:, :, 8:, :8], rtol=1e-4, atol=1e-5)
        else:
            assert bool(late[..., :8].isnan().all())


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate(use_cache: bool) -> None:
    model, ids = tiny_model("sdm", pad_token_id=0), tokens(2, 5)
    mask = torch.tensor([[1] * 5, [0] * 2 + [1] * 3])
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=3,
        do_sample=False,
        use_cache=use_cache,
        output_attentions=True,
        return_dict_in_generate=True,
    )
    rows = [5, 1, 1] if use_cache else [5, 6, 7]
    assert [[x.shape[2:] for x in step] for step in output.attentions] == [
        [(time, 5 + number)] * 4 for number, time in enumerate(rows)
    ]


def test_training_is_undisturbed() -> None:
    """Maps have no gradient, and the statistics of a batch normalisation are learnt once."""
    model, ids = tiny_model("sdm", query_batch_norm=True).train(), tokens(2, 6)
    start = {name: x.clone() for name, x in model.state_dict().items()}
    model(ids)
    plain = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(start)
    output = model(ids, labels=ids, output_attentions=True)
    assert_identical(list(model.state_dict().values()), list(plain.values()))
    assert not any(x.requires_grad for x in output.attentions)
    output.loss.backward()


def test_configured() -> None:
    model = tiny_model("sdm", attn_implementation="eager", output_attentions=True)
    assert len(model.model(tokens(1, 4)).attentions) == 4


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("sdm")
    with pytest.raises(ValueError, match="not documents packed by cu_seqlens"):
        model(tokens(1, 6), cu_seqlens=torch.tensor([0, 2, 6]), output_attentions=True)
    monkeypatch.setattr(reads, "MAX_LENGTH", 5)
    with pytest.raises(ValueError, match=r"up to 5 tokens; the stream has 6\. sdm\.analysis\.trace"):
        model(tokens(1, 6), output_attentions=True)
