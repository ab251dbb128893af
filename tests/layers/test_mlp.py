"""The feed-forward layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sdm.layers import GatedMLP


def test_it_is_a_gated_silu() -> None:
    layer = GatedMLP(6, 16)
    x = torch.randn(2, 3, 6)
    up, gate, down = (proj.weight for proj in (layer.up_proj, layer.gate_proj, layer.down_proj))
    torch.testing.assert_close(layer(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 3 * 6 * 16


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="intermediate_size must be a positive integer, got 0"):
        GatedMLP(6, 0)
