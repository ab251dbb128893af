"""Mamba2 against the one of transformers, its sizes and its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import assert_close
from sdm.layers import GatedDeltaNet, Mamba2


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_it_is_the_mamba2_of_transformers(groups: int) -> None:
    from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    size, heads, key_dim = 32, 4, 6
    config = Mamba2Config(
        hidden_size=size,
        num_heads=heads,
        head_dim=size // heads,
        state_size=key_dim,
        expand=1,
        n_groups=groups,
        num_hidden_layers=1,
        chunk_size=16,
    )
    theirs = Mamba2Mixer(config, 0).eval()
    ours = Mamba2(size, heads, key_dim, groups, norm_eps=config.layer_norm_epsilon)
    with torch.no_grad():
        theirs.norm.weight.uniform_(0.5, 1.5)
        theirs.D.uniform_(0.5, 1.5)
        keys = groups * key_dim
        parts = theirs.in_proj.weight.split((size, size, keys, keys, heads))
        projections = (ours.gate_proj, ours.value_proj, ours.key_proj, ours.query_proj, ours.decay_proj)
        for proj, weight in zip(projections, parts, strict=True):
            proj.weight.copy_(weight)
        ours.conv.weight.copy_(theirs.conv1d.weight.squeeze(1))
        ours.conv.bias.copy_(theirs.conv1d.bias)
        ours.decay_log_rate.copy_(theirs.A_log)
        ours.decay_bias.copy_(theirs.dt_bias)
        ours.skip.copy_(theirs.D)
        ours.output_norm.weight.copy_(theirs.norm.weight)
        ours.out_proj.weight.copy_(theirs.out_proj.weight)
        x = torch.randn(2, 70, size)
        assert_close([ours(x)], [theirs(x)], 2e-5)


def test_sizes_match_those_of_gated_delta_net() -> None:
    with torch.device("meta"):
        layer, other = Mamba2(768), GatedDeltaNet(768)
        assert layer.start_state(1).memory.shape == other.start_state(1).memory.shape == (1, 6, 64, 128)
    for name in ("query_proj", "key_proj", "value_proj", "gate_proj", "out_proj"):
        assert getattr(layer, name).weight.shape == getattr(other, name).weight.shape


def test_initialisation() -> None:
    layer = Mamba2(2048, 1024)
    rate, step = layer.decay_log_rate.exp(), torch.nn.functional.softplus(layer.decay_bias)
    assert rate.min() >= 0.999
    assert rate.max() <= 16.001
    assert step.min() >= 0.000999
    assert step.max() <= 0.1001
    assert (layer.skip == 1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 3}, "hidden_size = 16 must be divisible by num_heads = 3"),
        ({"num_heads": 4, "num_groups": 3}, "num_heads = 4 must be divisible by num_groups = 3"),
        ({"key_dim": 0}, "key_dim must be a positive integer, got 0"),
        ({"conv_size": 0}, "conv_size must be a positive integer, got 0"),
        ({"backend": "native"}, "backend must be one of"),
    ],
)
def test_bad_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mamba2(16, **arguments)


def test_a_state_of_another_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state\.memory must be of this layer"):
        Mamba2(16, 2)(torch.randn(2, 3, 16), Mamba2(16, 4).start_state(2))
