"""Raven against its equations in float64, its router and its sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_close
from sdm.layers import GatedDeltaNet, Raven


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def equations(layer: Raven, x: Tensor, eps: float) -> Tensor:
    """The layer token by token, head by head and slot by slot."""
    heads, keys, width, slots = layer.num_heads, layer.key_dim, layer.head_dim, layer.num_slots
    weight = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    x = x.double()
    y = torch.zeros_like(x)
    for b in range(len(x)):
        slot_keys = torch.zeros(heads, slots, keys, dtype=torch.float64)
        slot_values = torch.zeros(heads, slots, width, dtype=torch.float64)
        for t in range(x.shape[1]):
            token = x[b, t]
            read = []
            for h in range(heads):
                head, wide = slice(h * keys, (h + 1) * keys), slice(h * width, (h + 1) * width)
                q = rms(silu(weight["query_proj.weight"][head] @ token), weight["query_norm.weight"], eps)
                k = rms(silu(weight["key_proj.weight"][head] @ token), weight["key_norm.weight"], eps)
                v = silu(weight["value_proj.weight"][wide] @ token)
                m = torch.sigmoid(weight["router_proj.weight"][h * slots : (h + 1) * slots] @ token)
                kept = sorted(range(slots), key=lambda i, m=m: -float(m[i]))[: layer.num_writes]
                total = sum(float(m[i]) for i in kept)
                step = math.log1p(math.exp(weight["decay_proj.weight"][h] @ token + weight["decay_bias"][h]))
                strength = -math.exp(weight["decay_log_rate"][h]) * step
                for i in kept:
                    keep = math.exp(strength * float(m[i]) / total)
                    slot_keys[h, i] = keep * slot_keys[h, i] + (1 - keep) * k
                    slot_values[h, i] = keep * slot_values[h, i] + (1 - keep) * v
                o = (slot_keys[h] @ q).softmax(0) @ slot_values[h]
                read.append(rms(silu(o), weight["output_norm.weight"], eps))
            y[b, t] = weight["out_proj.weight"] @ (torch.cat(read) * silu(weight["gate_proj.weight"] @ token))
    return y


def test_it_follows_the_equations() -> None:
    layer = Raven(32, 2, norm_eps=1e-6)
    with torch.no_grad():
        for norm in (layer.query_norm, layer.key_norm, layer.output_norm):
            norm.weight.uniform_(0.5, 1.5)
        layer.router_proj.weight.mul_(3)
    x = torch.randn(2, 70, 32)
    assert_close([layer(x)], [equations(layer, x, 1e-6)], 1e-5)
    assert_close([layer.double()(x.double())], [equations(layer, x, 1e-6)], 1e-11)


def test_the_router_leaves_the_other_slots_alone() -> None:
    layer = Raven(16, 2, num_slots=8, num_writes=3)
    x = torch.randn(2, 9, 16)
    log_decay = layer._gates(x, None)[1]
    assert int((log_decay != 0).sum(-1).max()) == int((log_decay != 0).sum(-1).min()) == 3
    _, state = layer(x[:, :8], return_state=True)
    _, after = layer(x[:, 8:], state, return_state=True)
    quiet = log_decay[:, 8] == 0
    assert torch.equal(after.memory[quiet], state.memory[quiet])
    assert not torch.equal(after.memory[~quiet], state.memory[~quiet])


def test_a_router_that_has_underflowed_writes_nothing() -> None:
    layer = Raven(16, 2)
    with torch.no_grad():
        layer.router_proj.weight.copy_(torch.full_like(layer.router_proj.weight, -50.0))
    y, state = layer(torch.ones(1, 3, 16), return_state=True)
    assert y.isfinite().all()
    assert not state.memory.any()


def test_sizes_match_those_of_a_gated_delta_net() -> None:
    with torch.device("meta"):
        raven, dense = Raven(768), GatedDeltaNet(768)
        states = raven.start_state(1).memory.numel(), dense.start_state(1).memory.numel()
    assert (raven.key_dim, raven.num_slots, raven.num_writes) == (32, 64, 8)
    weights = sum(x.numel() for name, x in raven.named_parameters() if x.dim() > 1 and "decay" not in name)
    assert weights == 4 * 768**2
    assert states[0] == 1.25 * states[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_slots": 4, "num_writes": 5}, "num_writes = 5 exceeds num_slots = 4"),
        ({"key_dim": 0}, "key_dim must be a positive integer, got 0"),
        ({"num_heads": 3}, "hidden_size = 16 must be divisible by num_heads = 3"),
        ({"backend": "native"}, "backend must be one of .* for slot_attention"),
    ],
)
def test_bad_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Raven(16, **arguments)
