"""Models with linear layers for decoding."""

from __future__ import annotations

import copy
import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

import sdm
from sdm.layers import decode_linear, huge_pages
from sdm.layers.decode_linear import (
    MOST_ROWS,
    WEIGHTS,
    DecodeLinear,
    DecodeMLP,
    DecodeWindowAttention,
    project_together,
)


def small_model(**options: object) -> sdm.SDMForCausalLM:
    torch.manual_seed(0)
    config = sdm.SDMConfig(
        vocab_size=50,
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "sdm"],
        num_slots=64,
        num_writes=4,
        num_reads=4,
        **options,
    )
    return sdm.SDMForCausalLM(config).eval()


def logits_of_steps(model: sdm.SDMForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    cache = sdm.SDMCache(model.config)
    with torch.no_grad():
        return torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(ids.shape[1])], dim=1)


@pytest.mark.parametrize("batch", [1, 3, MOST_ROWS + 1])
def test_float32_changes_nothing_but_rounding(batch: int) -> None:
    model = small_model()
    ids = torch.randint(0, 50, (batch, 12))
    before = logits_of_steps(model, ids)
    weight = model.lm_head.weight
    assert sdm.optimize_for_decoding(model) is model
    assert isinstance(model.lm_head, DecodeLinear)
    assert model.lm_head.weight is weight
    torch.testing.assert_close(logits_of_steps(model, ids), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_steps_and_prefill_use_the_same_reduced_weights(weights: str) -> None:
    model = sdm.optimize_for_decoding(small_model(), weights)
    ids = torch.randint(0, 50, (1, MOST_ROWS + 4))
    with torch.no_grad():
        prefill = model(ids).logits
    torch.testing.assert_close(logits_of_steps(model, ids), prefill, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("weights", "levels"), [("bfloat16", 128), ("int8", 127)])
def test_weights_are_rounded_to_the_nearest(weights: str, levels: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 40)
    exact = layer.weight.detach().clone()
    sdm.optimize_for_decoding(nn.Sequential(layer), weights)
    assert isinstance(layer, DecodeLinear)
    error = (layer.weights() - exact).abs().amax(1) / exact.abs().amax(1)
    assert (error > 0).all()
    assert (error <= 0.5001 / levels).all()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_saved_as_float32(weights: str, tmp_path: Path) -> None:
    model = sdm.optimize_for_decoding(small_model(tie_word_embeddings=False), weights)
    ids = torch.randint(0, 50, (1, 20))
    model.save_pretrained(tmp_path)
    again = sdm.SDMForCausalLM.from_pretrained(tmp_path).eval()
    assert {x.dtype for x in again.parameters()} == {torch.float32}
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-6)


def test_gradients_pass_through_reduced_weights() -> None:
    layer = nn.Linear(8, 5)
    x = torch.randn(2, 8, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    sdm.optimize_for_decoding(nn.Sequential(layer), "bfloat16")
    torch.testing.assert_close(torch.autograd.grad(layer(x).sum(), x)[0], expected, rtol=0.01, atol=0.01)


def test_a_row_of_zeros_stays_zero() -> None:
    layer = nn.Linear(8, 5, bias=False)
    nn.init.zeros_(layer.weight[2])
    sdm.optimize_for_decoding(nn.Sequential(layer), "int8")
    with torch.no_grad():
        y = layer(torch.randn(1, 8))
    assert y[0, 2] == 0
    assert y.isfinite().all()


def test_what_cannot_be_reduced_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="weights must be one of"):
        sdm.optimize_for_decoding(model, "int4")
    model[1].to(torch.float16)
    with pytest.raises(ValueError, match=r"1\.weight is torch.float16"):
        sdm.optimize_for_decoding(model, "int8")
    assert type(model[0]) is nn.Linear, "nothing is changed by a call that fails"
    reduced = sdm.optimize_for_decoding(nn.Sequential(nn.Linear(4, 4)), "int8")
    with pytest.raises(ValueError, match="as it was loaded"):
        sdm.optimize_for_decoding(reduced, "bfloat16")
    with pytest.raises(RuntimeError, match="load them, then optimize_for_decoding"):
        reduced.load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict())


def test_generate_session_and_deterministic_steps() -> None:
    plain = small_model()
    fast = sdm.optimize_for_decoding(copy.deepcopy(plain))
    ids = torch.randint(0, 50, (1, 7))
    tokens = plain.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(fast.generate(ids, max_new_tokens=12, do_sample=False), tokens)
    session = sdm.Session(fast)
    session.add(ids[0].tolist())
    assert [piece.token for piece in session.generate(12)] == tokens[0, 7:].tolist()
    with torch.no_grad(), sdm.layers.deterministic():
        steps = logits_of_steps(fast, ids)
        cache = sdm.SDMCache(fast.config)
        assert torch.equal(fast(ids, past_key_values=cache).logits, steps)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_fused_steps_compute_what_the_layers_compute(weights: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sdm.optimize_for_decoding(small_model(sliding_window=5), weights)
    block = model.model.layers[0]
    assert isinstance(block.mlp, DecodeMLP)
    assert isinstance(block.mixer, DecodeWindowAttention)
    ids = torch.randint(0, 50, (batch, 14))  # past the end of the ring
    calls = []
    for name in ("linear_group", "gated_mlp_rows", "window_step_"):
        function = getattr(decode_linear, name)
        monkeypatch.setattr(
            decode_linear, name, lambda *args, name=name, function=function: calls.append(name) or function(*args)
        )
    fused = logits_of_steps(model, ids)
    # The first token of a cache has no state to step from.
    assert calls.count("window_step_") == 13
    assert calls.count("gated_mlp_rows") == 28
    assert calls.count("linear_group") == 26
    monkeypatch.setattr(decode_linear, "_weights_of", lambda layer: None)
    torch.testing.assert_close(fused, logits_of_steps(model, ids), rtol=1e-5, atol=1e-5)
    assert calls.count("linear_group") == 26


def test_fused_steps_in_other_dtypes_and_with_scaled_positions() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    model = small_model(sliding_window=5, rope_parameters=rope)
    ids = torch.randint(0, 50, (2, 40))
    expected = logits_of_steps(model, ids)
    sdm.optimize_for_decoding(model)
    torch.testing.assert_close(logits_of_steps(model, ids), expected, rtol=1e-5, atol=1e-5)
    model.double()
    exact = logits_of_steps(model, ids)
    torch.testing.assert_close(exact.float(), expected, rtol=1e-4, atol=1e-4)


def test_hooks_see_every_layer() -> None:
    model = sdm.optimize_for_decoding(small_model())
    seen = []
    for name, layer in model.named_modules():
        if isinstance(layer, DecodeLinear):
            layer.register_forward_hook(lambda *_, name=name: seen.append(name))
    logits_of_steps(model, torch.randint(0, 50, (1, 2)))
    counts = {name: seen.count(name) for name in seen}
    assert set(counts.values()) == {2}
    assert len(counts) == sum(isinstance(layer, DecodeLinear) for layer in model.modules())


def test_rewinding_fused_steps() -> None:
    model = sdm.optimize_for_decoding(small_model(sliding_window=5))
    session = sdm.Session(model, history=16)
    session.add([1, 2, 3, 4, 5, 6, 7])
    mark = session.mark()
    expected = [piece.token for piece in session.generate(9)]
    for to in (4, mark):
        kept = len(expected) - 4 if to == 4 else 0
        session.rewind(to)
        assert [piece.token for piece in session.generate(9 - kept)] == expected[kept:]


def test_layers_that_are_not_fused_are_called_one_by_one() -> None:
    layers = sdm.optimize_for_decoding(nn.Sequential(nn.Linear(8, 3), nn.Linear(8, 4)))
    x = torch.randn(1, 8)
    with torch.no_grad():
        together = project_together(x, *layers)
        assert together is not None
        torch.testing.assert_close(together, torch.cat([layer(x) for layer in layers], dim=-1), rtol=0, atol=0)
        assert project_together(torch.randn(MOST_ROWS + 1, 8), *layers) is None
        assert project_together(x, layers[0], nn.Linear(8, 4)) is None
    assert project_together(x, *layers) is None, "gradients are recorded"


def test_weights_move_to_huge_pages(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(512, 512), nn.Linear(512, 700), nn.Linear(512, 512)])
    model[2].weight = model[0].weight
    before = copy.deepcopy(model)
    weight = model[0].weight
    sdm.optimize_for_decoding(model)
    assert model[2].weight is model[0].weight is weight
    addresses = [layer.weight.data_ptr() for layer in model[:2]]
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert addresses[0] % huge_pages.PAGE == 0
        assert addresses[1] == addresses[0] + weight.nbytes
    for layer, old in zip(model, before, strict=True):
        assert torch.equal(layer.weight, old.weight)
        assert layer.weight.untyped_storage().nbytes() == layer.weight.nbytes, "saved without its neighbours"
    del model[1:], before
    weight.data.mul_(2)  # the block is alive
    torch.save(model.state_dict(), tmp_path / "saved")
    assert torch.equal(torch.load(tmp_path / "saved")["0.weight"], weight)


def test_parameters_in_shared_memory_do_not_move() -> None:
    whole = torch.randn(1024, 1024)
    model = nn.ModuleList([nn.Linear(1024, 512, bias=False) for _ in range(2)])
    for layer, part in zip(model, whole.chunk(2), strict=True):
        layer.weight = nn.Parameter(part)
    sdm.optimize_for_decoding(model)
    whole.zero_()
    assert all((layer.weight == 0).all() for layer in model)
