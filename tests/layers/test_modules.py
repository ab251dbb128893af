"""The modules that layers are made of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import assert_close, assert_identical
from sdm.layers.interface import Streams
from sdm.layers.modules import GatedMLP, MaskedBatchNorm, ShortConvolution


def test_it_is_a_gated_silu() -> None:
    layer = GatedMLP(6, 16)
    x = torch.randn(2, 3, 6)
    up, gate, down = (proj.weight for proj in (layer.up_proj, layer.gate_proj, layer.down_proj))
    torch.testing.assert_close(layer(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 3 * 6 * 16


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="intermediate_size must be a positive integer, got 0"):
        GatedMLP(6, 0)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_the_short_convolution_is_a_convolution(kernel_size: int, bias: bool) -> None:
    conv = ShortConvolution(6, kernel_size, bias).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    padded = F.pad(x.transpose(1, 2), (kernel_size - 1, 0))
    expected = F.silu(F.conv1d(padded, conv.weight.unsqueeze(1), conv.bias, groups=6)).transpose(1, 2)
    y, tail = conv(x, None, Streams(2))
    assert_close([y], [expected], 1e-12)
    assert_identical([tail], [x[:, 9 - kernel_size + 1 :]])


def test_masked_batch_norm_ignores_padding() -> None:
    norm, plain = MaskedBatchNorm(4).train(), torch.nn.BatchNorm1d(4, momentum=0.1).train()
    x = torch.randn(2, 10, 4)
    mask = torch.rand(2, 10) < 0.6
    expected = plain(x[mask])
    actual = norm(torch.where(mask[..., None], x, 1e6), mask)
    torch.testing.assert_close(actual[mask], expected)
    torch.testing.assert_close(norm.running_mean, plain.running_mean)
    before = norm.running_var.clone()
    assert norm(x, torch.zeros(2, 10, dtype=torch.bool)).isfinite().all()
    torch.testing.assert_close(norm.running_var, before)
    torch.testing.assert_close(norm.eval()(x), (x - norm.running_mean) / (norm.running_var + 1e-5).sqrt())
