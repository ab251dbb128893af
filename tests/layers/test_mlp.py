"""The feed-forward layer and its sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sdm.layers import GatedMLP, mlp_size


def test_sizes_of_the_paper() -> None:
    sizes = {768: 2048, 1024: 3072, 1280: 4096, 1536: 4096, 1920: 5120, 3840: 10240}
    assert {width: mlp_size(width, 1024) for width in sizes} == sizes
    assert mlp_size(128, 64) == 384
    assert mlp_size(3, 1) == 8


def test_it_is_a_gated_silu() -> None:
    layer = GatedMLP(6, 16)
    x = torch.randn(2, 3, 6)
    up, gate, down = (proj.weight for proj in (layer.up_proj, layer.gate_proj, layer.down_proj))
    torch.testing.assert_close(layer(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 3 * 6 * 16


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="intermediate_size must be a positive integer, got 0"):
        GatedMLP(6, 0)
    with pytest.raises(ValueError, match="multiple_of must be a positive integer, got 0"):
        mlp_size(6, 0)
