"""Matrix products of few rows by the compiled core."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sdm.native import core
from sdm.ops.linear_rows import Weights, gated_mlp_rows, linear_group, linear_rows
from sdm.ops.window_step import window_step_

pytestmark = pytest.mark.skipif(core is None, reason="the compiled core is not built")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 768, 130), (5, 33, 1), (9, 16, 64), (0, 4, 3), (3, 0, 2)])
def test_product(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    tolerance = 2e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(
        linear_rows(x, weight, bias).double(), exact, rtol=tolerance, atol=tolerance * max(inputs, 1)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_reduced_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, scale = torch.randn(2, 3, 50), (torch.randn(70, 50) * 40).to(dtype), torch.rand(70)
    y = linear_rows(x, weight, scale=scale)
    assert y.shape == (2, 3, 70)
    exact = F.linear(x.double(), weight.double()) * scale.double()
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-3)


def test_a_row_depends_on_nothing_but_itself() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(37, 771), torch.randn(133, 771)
    whole = linear_rows(x, weight)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for begin, end in [(0, 1), (3, 4), (5, 9), (20, 37)]:
            assert torch.equal(linear_rows(x[begin:end], weight), whole[begin:end])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(linear_rows(x.t().contiguous().t(), weight.t().contiguous().t()), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 7)}, r"x must be \[...,8\]"),
        ({"x": torch.zeros(2, 8, dtype=torch.float16)}, "in float32 or float64"),
        ({"x": torch.zeros(2, 8, dtype=torch.float64)}, "weight of its dtype"),
        ({"bias": torch.zeros(4)}, r"bias must be \[3\]"),
        ({"scale": torch.zeros(3, dtype=torch.float64)}, r"scale must be \[3\] in torch.float32"),
        ({"x": torch.zeros(2, 8, device="meta")}, "on a CPU"),
    ],
)
def test_wrong_input(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_rows(**{"x": torch.zeros(2, 8), "weight": torch.zeros(3, 8), **change})


def test_a_group_has_the_bits_of_its_layers() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 50)
    layers = [
        Weights(torch.randn(70, 50), torch.randn(70)),
        Weights(torch.randn(1, 50).to(torch.bfloat16)),
        Weights((torch.randn(33, 50) * 40).to(torch.int8), None, torch.rand(33)),
        Weights(torch.randn(50, 16).t()),
    ]
    y = linear_group(x, layers)
    assert torch.equal(y, torch.cat([linear_rows(x, *layer) for layer in layers], dim=-1))
    assert linear_group(x, []).shape == (2, 3, 0)
    with pytest.raises(ValueError, match=r"x must be \[...,49\]"):
        linear_group(x, [*layers, Weights(torch.randn(3, 49))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_gated_mlp(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 1, 24)

    def layer(outputs: int, inputs: int) -> Weights:
        weight = torch.randn(outputs, inputs)
        return (
            Weights((weight * 40).to(dtype), None, torch.rand(outputs) / 40)
            if dtype == torch.int8
            else Weights(weight.to(dtype))
        )

    gate, up, down = layer(130, 24), layer(130, 24), layer(24, 130)
    gated, raised = linear_rows(x, *gate), linear_rows(x, *up)
    torch.testing.assert_close(
        gated_mlp_rows(x, gate, up, down), linear_rows(F.silu(gated) * raised, *down), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(ValueError, match=r"\[hidden,inputs\]"):
        gated_mlp_rows(x, layer(129, 24), up, down)
    with pytest.raises(ValueError, match="no bias"):
        gated_mlp_rows(x, gate, up._replace(bias=torch.zeros(130)), down)


def test_window_step_refuses_what_does_not_fit() -> None:
    S, H, G, D, W = 2, 4, 2, 6, 5
    good = {
        "projected": torch.zeros(S, 2 * (H + G) * D),
        "key": torch.zeros(S, G, W, D),
        "value": torch.zeros(S, G, W, D),
        "length": torch.zeros(S, dtype=torch.int64),
        "turns": torch.zeros(D // 2, dtype=torch.float64),
        "rope_scale": 1.0,
        "heads": H,
    }
    assert window_step_(**good).shape == (S, H * D)
    wrong = {
        "projected": (torch.zeros(S, 7), ValueError, "projected"),
        "key": (torch.zeros(S, G, D, W).transpose(2, 3), ValueError, "key must be contiguous"),
        "value": (torch.zeros(S, G, W, D, dtype=torch.float64), TypeError, "all float32 or all float64"),
        "length": (torch.full((S,), -1), ValueError, "negative"),
        "turns": (torch.zeros(D, dtype=torch.float64), ValueError, "turns"),
        "heads": (3, ValueError, "projected"),
    }
    for name, (value, error, message) in wrong.items():
        with pytest.raises(error, match=message):
            window_step_(**{**good, name: value})
