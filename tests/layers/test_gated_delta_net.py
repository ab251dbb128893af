"""Gated DeltaNet against the one of transformers, its sizes and its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helpers import assert_close, assert_identical
from sdm.layers import GatedDeltaNet, SparseDeltaMemory
from sdm.layers.interface import Streams


def test_it_is_the_gated_delta_net_of_transformers() -> None:
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    size, heads, key_dim, value_dim = 32, 2, 8, 16
    config = Qwen3NextConfig(
        hidden_size=size,
        num_hidden_layers=1,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"],
    )
    theirs = Qwen3NextGatedDeltaNet(config, 0)
    ours = GatedDeltaNet(size, heads, key_dim, norm_eps=config.rms_norm_eps)
    with torch.no_grad():
        theirs.dt_bias.uniform_(-4, -1)
        theirs.norm.weight.uniform_(0.5, 1.5)
        # Theirs keeps the query, key, value and gate of one head together.
        packed = theirs.in_proj_qkvz.weight.unflatten(0, (heads, -1)).split((key_dim, key_dim, value_dim, value_dim), 1)
        for proj, weight in zip((ours.query_proj, ours.key_proj, ours.value_proj, ours.gate_proj), packed, strict=True):
            proj.weight.copy_(weight.flatten(0, 1))
        beta, decay = theirs.in_proj_ba.weight.unflatten(0, (heads, 2)).unbind(1)
        ours.beta_proj.weight.copy_(beta)
        ours.decay_proj.weight.copy_(decay)
        ours.conv.weight.copy_(theirs.conv1d.weight.squeeze(1))
        ours.decay_log_rate.copy_(theirs.A_log)
        ours.decay_bias.copy_(theirs.dt_bias)
        ours.output_norm.weight.copy_(theirs.norm.weight)
        ours.out_proj.weight.copy_(theirs.out_proj.weight)
    x = torch.randn(2, 70, size)
    assert_close([ours(x)], [theirs(x)], 2e-5)


def test_sizes_match_those_of_sparse_delta_memory() -> None:
    with torch.device("meta"):
        dense, sparse = GatedDeltaNet(768), SparseDeltaMemory(768)
        state = dense.start_state(1)
    for name in ("query_proj", "key_proj", "value_proj", "gate_proj", "out_proj"):
        assert getattr(dense, name).weight.shape == getattr(sparse, name).weight.shape
    assert (dense.num_heads, dense.key_dim, dense.head_dim) == (6, 64, 128)
    assert state.memory.numel() == 49152


def test_a_fresh_state_is_the_learned_one() -> None:
    layer = GatedDeltaNet(16, 2, learned_initial_state=True, initial_state_std=0.5)
    assert layer.initial_state is not None
    assert_identical([layer.start_state(3).memory], [layer.initial_state.expand(3, -1, -1, -1)])
    assert GatedDeltaNet(16, 2).initial_state is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 3}, "hidden_size = 16 must be divisible by num_heads = 3"),
        ({"key_dim": 0}, "key_dim must be a positive integer, got 0"),
        ({"conv_size": -1}, "conv_size must be a number of taps, or 0 for no convolution, got -1"),
        ({"output_gate": "tanh"}, "output_gate must be one of"),
        ({"initial_state_std": -1.0}, "initial_state_std must not be negative"),
        ({"largest_decay_rate": 0.0}, "largest_decay_rate must be positive, got 0.0"),
        ({"backend": "gpu"}, "backend must be one of"),
    ],
)
def test_bad_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatedDeltaNet(16, **arguments)


def test_a_state_of_another_layer_is_refused() -> None:
    x = torch.randn(2, 3, 16)
    with pytest.raises(ValueError, match=r"state\.memory must be of this layer"):
        GatedDeltaNet(16, 2)(x, GatedDeltaNet(16, 4).start_state(2))
    with pytest.raises(ValueError, match=r"state\.tail must be of this layer"):
        GatedDeltaNet(16, 2)(x, GatedDeltaNet(16, 2, conv_size=0).start_state(2))


def test_a_convolution_that_starts_as_a_shift() -> None:
    """Keys start at the token before, queries and values at the token: with W_q = W_k a token finds its successor."""
    layer = GatedDeltaNet(16, 2, shift_convolution=True)
    with torch.no_grad():
        layer.query_proj.weight.copy_(layer.key_proj.weight)
    x = torch.randn(2, 9, 16)
    assert layer.conv is not None
    query, key, value = layer._heads(layer.conv(layer._project(x, None), None, Streams(2))[0])
    assert_close([key[:, 1:]], [query[:, :-1] * layer.key_dim**0.5], 1e-6)
    assert not key[:, 0].any()
    assert_close([value.flatten(-2)], [F.silu(layer.value_proj(x))], 1e-6)
    layer(x).square().sum().backward()
    assert layer.conv.weight.grad is not None
    assert bool((layer.conv.weight.grad.abs().sum(0) > 0).all())  # every tap learns
    with pytest.raises(ValueError, match=r"shift_convolution needs a conv_size of at least 2, .* got 1"):
        GatedDeltaNet(16, 2, conv_size=1, shift_convolution=True)
