"""Scaled rotary positions: as Llama's in transformers, however the tokens are fed, and kept by a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import sdm
from helpers import assert_close, assert_identical, relative_error
from tiny_models import tiny_config, tiny_model, tokens

# A context of 16 tokens, stretched: the frequencies of all types differ within a few dozen tokens.
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.5},
    "yarn_mscale": {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.3},
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


def parameters(name: str) -> dict[str, Any]:
    return {"rope_type": name.partition("_")[0], "rope_theta": 1e4, **TYPES[name]}


def llama_attention(layer: sdm.layers.FullAttention, x: Tensor, rope: dict[str, Any]) -> Tensor:
    """The layer's output with positions by transformers."""
    config = LlamaConfig(
        hidden_size=layer.hidden_size,
        num_attention_heads=layer.num_heads,
        max_position_embeddings=64,
        rope_parameters=dict(rope),
    )
    query, key, value = (
        proj(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for proj in (layer.query_proj, layer.key_proj, layer.value_proj)
    )
    cosine, sine = LlamaRotaryEmbedding(config)(x, torch.arange(x.shape[1]).unsqueeze(0))
    query, key = apply_rotary_pos_emb(query, key, cosine, sine)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return layer.out_proj(mixed.transpose(1, 2).flatten(-2) * torch.sigmoid(layer.gate_proj(x)))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("pieces", [[60], [17, 1, 30, 12], [1] * 60], ids=["whole", "split", "stepwise"])
@torch.no_grad()
def test_agrees_with_llama(name: str, pieces: list[int]) -> None:
    layer = tiny_model("full_attention", rope_parameters=parameters(name)).model.layers[3].mixer
    x = torch.randn(2, 60, layer.hidden_size)
    expected = llama_attention(layer, x, parameters(name))
    if name != "default":
        assert relative_error(expected, llama_attention(layer, x, parameters("default"))) > 0.01
    state = layer.start_state(2)
    outputs = []
    for piece in x.split(pieces, dim=1):
        if len(pieces) == 60:
            outputs.append(layer.step_(piece[:, 0], state).unsqueeze(1))
        else:
            y, state = layer(piece, state=state, return_state=True)
            outputs.append(y)
    assert_close([torch.cat(outputs, dim=1)], [expected], 1e-5)


@pytest.mark.parametrize("name", TYPES)
@torch.no_grad()
def test_whole_split_and_stepwise(name: str) -> None:
    model, ids = tiny_model("mixed", rope_parameters=parameters(name)), tokens(2, 40)
    expected = model(ids, use_cache=False).logits
    for pieces in ([40], [13, 1, 26], [1] * 40):
        cache = sdm.SDMCache(model.config)
        actual = [model(piece, past_key_values=cache).logits for piece in ids.split(pieces, dim=1)]
        assert_close([torch.cat(actual, dim=1)], [expected], 1e-5)


@pytest.mark.parametrize("name", TYPES)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, ids = tiny_model("mixed", rope_parameters=parameters(name)), tokens(1, 30)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.rope_parameters == model.config.rope_parameters
    assert_identical([loaded(ids).logits], [model(ids).logits])
    assert_identical([loaded.bfloat16()(ids).logits], [model.bfloat16()(ids).logits])


@pytest.mark.parametrize("how", ["assigned", "changed", "rope_scaling", "before the model"])
@pytest.mark.filterwarnings("ignore:.*rope_scaling.*deprecated:FutureWarning")
def test_parameters_that_were_set_since_take_effect(how: str) -> None:
    wanted, ids = parameters("yarn"), tokens(1, 30)
    torch.manual_seed(1)
    expected = tiny_model("mixed", rope_parameters=wanted)
    torch.manual_seed(1)
    if how == "before the model":
        config = tiny_config("mixed")
        config.rope_parameters = wanted
        model = sdm.SDMForCausalLM(config).eval()
    else:
        model = tiny_model("mixed")
        before = model(ids).logits
        if how == "assigned":
            model.config.rope_parameters = wanted
        elif how == "changed":
            model.config.rope_parameters.update(wanted)
        else:
            model.config.rope_scaling = wanted
        assert relative_error(model(ids).logits, before) > 0.01
    assert_identical([model(ids).logits], [expected(ids).logits])


def test_each_kind_of_attention_may_have_its_own(tmp_path: Path) -> None:
    nested = {"full_attention": parameters("llama3"), "sliding_attention": {"rope_theta": 1e3}}
    model, ids = tiny_model("mixed", rope_parameters=nested), tokens(1, 30)
    local, full = model.model.layers[0].mixer.rope, model.model.layers[1].mixer.rope
    assert (local.theta, local.frequencies) == (1e3, None)
    assert full == tiny_model("mixed", rope_parameters=parameters("llama3")).model.layers[1].mixer.rope
    model.save_pretrained(tmp_path)
    assert_identical([AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits], [model(ids).logits])


@torch.no_grad()
def test_states_of_other_positions_are_refused() -> None:
    model, ids = tiny_model("mixed"), tokens(1, 9)
    cache = model(ids, use_cache=True).past_key_values
    state = sdm.MemoryState.from_cache(model, cache)
    model.config.rope_parameters.update(parameters("linear"))
    with pytest.raises(ValueError, match="its rope_parameters is"):
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="its rope_parameters is"):
        state.cache(model)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, r"'dynamic': its frequencies change with the length .*yarn"),
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope': its frequencies change"),
        ({"rope_type": "none-such"}, r"rope_type.*'linear', 'yarn', 'llama3'.*none-such"),
        ({"rope_type": "linear"}, "needs 'factor'"),
        ({"rope_type": "linear", "factor": 0.5}, "factor.*at least 1, got 0.5"),
        ({"rope_type": "linear", "factor": "2"}, "factor.*positive number, got '2'"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "has no 'partial_rotary_factor'"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fats": 3.0}, "has no 'beta_fats'.*beta_fast"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast.*greater"),
        ({"full_attention": {"rope_theta": 1e4}}, "none for 'sliding_attention'"),
        ({"full_attention": {}, "sliding_attention": {}, "rope_tpe": "yarn"}, "rope_tpe"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config("mixed", rope_parameters=dict(rope))
    config = tiny_config("mixed")
    config.rope_parameters = dict(rope)
    with pytest.raises(ValueError, match=message):
        sdm.SDMForCausalLM(config)
    model = tiny_model("mixed")
    model.config.rope_parameters = dict(rope)
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 4))
