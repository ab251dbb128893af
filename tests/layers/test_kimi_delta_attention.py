"""Kimi Delta Attention against its equations in float64, and where it is Gated DeltaNet."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers import assert_close
from sdm.layers import GatedDeltaNet, KimiDeltaAttention


def equations(layer: KimiDeltaAttention, x: Tensor) -> Tensor:
    """The layer token by token, head by head, with matrices as the equations have them."""
    heads, keys, width = layer.num_heads, layer.key_dim, layer.head_dim
    weight = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    x = x.double()
    projected = torch.cat([x @ weight[f"{name}_proj.weight"].T for name in ("query", "key", "value")], dim=-1)
    taps = weight["conv.weight"]
    y = torch.zeros_like(x)
    for b in range(len(x)):
        states = [torch.zeros(keys, width, dtype=torch.float64) for _ in range(heads)]
        for t in range(x.shape[1]):
            mixed = torch.zeros(projected.shape[-1], dtype=torch.float64)
            for back in range(min(t + 1, taps.shape[1])):
                mixed += taps[:, -1 - back] * projected[b, t - back]
            mixed = mixed * torch.sigmoid(mixed)
            query, key, value = mixed.split((heads * keys, heads * keys, heads * width))
            beta = torch.sigmoid(weight["beta_proj.weight"] @ x[b, t])
            step = weight["decay_proj.weight"] @ (weight["decay_down_proj.weight"] @ x[b, t])
            gate = torch.sigmoid(weight["gate_proj.weight"] @ x[b, t])
            read = []
            for h in range(heads):
                q, k = (part[h * keys : (h + 1) * keys] for part in (query, key))
                q, k = (part / torch.sqrt((part * part).sum() + layer.norm_eps) for part in (q, k))
                v = value[h * width : (h + 1) * width]
                rate = math.exp(weight["decay_log_rate"][h])
                g = -rate * torch.log1p(torch.exp(step[h * keys : (h + 1) * keys] + weight["decay_bias"][h]))
                decayed = torch.diag(torch.exp(g)) @ states[h]
                states[h] = decayed + beta[h] * torch.outer(k, v - decayed.T @ k)
                o = states[h].T @ q * keys**-0.5
                read.append(o / torch.sqrt((o * o).mean() + layer.norm_eps) * weight["output_norm.weight"])
            y[b, t] = weight["out_proj.weight"] @ (torch.cat(read) * gate)
    return y


def test_it_follows_the_equations() -> None:
    layer = KimiDeltaAttention(16, 2)
    with torch.no_grad():
        layer.output_norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(2, 70, 16)
    assert_close([layer(x)], [equations(layer, x)], 1e-5)
    assert_close([layer.double()(x.double())], [equations(layer, x)], 1e-11)


def test_equal_decays_of_all_channels_are_a_gated_delta_net() -> None:
    kimi, dense = KimiDeltaAttention(16, 2).double(), GatedDeltaNet(16, 2, output_gate="sigmoid").double()
    shared = {name: x for name, x in kimi.state_dict().items() if name in dense.state_dict() and "decay" not in name}
    assert not dense.load_state_dict(shared, strict=False).unexpected_keys
    with torch.no_grad():
        kimi.decay_proj.weight.copy_(kimi.decay_proj.weight.view(2, 4, -1)[:, :1].expand(2, 4, -1).flatten(0, 1))
        kimi.decay_bias.copy_(kimi.decay_bias[:, :1].expand_as(kimi.decay_bias))
        dense.decay_proj.weight.copy_(kimi.decay_proj.weight.view(2, 4, -1)[:, 0] @ kimi.decay_down_proj.weight)
        dense.decay_bias.copy_(kimi.decay_bias[:, 0])
        dense.decay_log_rate.copy_(kimi.decay_log_rate)
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    assert_close([kimi(x)], [dense(x)], 1e-10)


def test_sizes_and_start() -> None:
    with torch.device("meta"):
        kimi, dense = KimiDeltaAttention(1024), GatedDeltaNet(1024)
    weights, others = (sum(x.numel() for x in layer.parameters() if x.dim() > 1) for layer in (kimi, dense))
    # A full-rank output gate: 4 d^2 + 192 d and the projections of beta and the taps.
    assert weights - 8 * 1024 - kimi.conv.weight.numel() - kimi.decay_bias.numel() == 4 * 1024**2 + 192 * 1024
    assert 1.03 < weights / others < 1.06
    layer = KimiDeltaAttention(128, 4)
    rate, step = layer.decay_log_rate.exp(), torch.nn.functional.softplus(layer.decay_bias)
    assert bool(((rate >= 1) & (rate <= 16)).all())
    assert bool(((step >= 0.99e-3) & (step <= 0.101)).all())
    assert layer.decay_bias.shape == (4, 16)
    assert {"decay_log_rate", "decay_bias"} <= layer.no_weight_decay()


def test_bad_construction() -> None:
    with pytest.raises(ValueError, match="decay_rank must be a positive integer, got 0"):
        KimiDeltaAttention(16, decay_rank=0)
