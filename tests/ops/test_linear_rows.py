"""Matrix products of few rows by the compiled core."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sdm.native import core
from sdm.ops.linear_rows import linear_rows

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
