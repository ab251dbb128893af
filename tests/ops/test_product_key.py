"""Product-key selection: every backend gives the slots that a brute-force search in exact arithmetic gives."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import cpu_backends
from sdm.ops.product_key import product_key_topk

BACKENDS = cpu_backends("product_key_topk")
DOUBLE = [backend for backend in BACKENDS if backend != "triton"]  # those that compute in float64 too


def brute_force(scores: list[float], k: int) -> list[int]:
    n = len(scores) // 2
    sums = {i * n + j: Fraction(scores[i]) + Fraction(scores[n + j]) for i in range(n) for j in range(n)}
    return sorted(sorted(sums, key=lambda slot: (-sums[slot], slot))[:k])


def check(scores: torch.Tensor, k: int, backend: str) -> None:
    values, index = product_key_topk(scores, k, backend=backend)
    n = scores.shape[-1] // 2
    assert values.shape == index.shape == (*scores.shape[:-1], k)
    assert index.dtype == torch.int64
    wide = scores.to(values.dtype)
    torch.testing.assert_close(values, wide.gather(-1, index // n) + wide.gather(-1, n + index % n), rtol=0, atol=0)
    for row, slots in zip(scores.double().reshape(-1, 2 * n).tolist(), index.reshape(-1, k).tolist(), strict=True):
        assert slots == brute_force(row, k)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 3), (5, 1), (8, 8), (7, 12), (6, 35), (6, 36), (20, 64), (32, 17)])
def test_random_scores(backend: str, n: int, k: int) -> None:
    check(torch.randn(3, 2, 2 * n, generator=torch.Generator().manual_seed(n * k)), k, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 5, 16, 100])
def test_ties_go_to_the_lower_slot(backend: str, dtype: torch.dtype, k: int) -> None:
    if dtype == torch.float64 and backend not in DOUBLE:
        pytest.skip("computes in float32")
    generator = torch.Generator().manual_seed(k)
    few, zeros = torch.randint(-2, 3, (6, 24), generator=generator), torch.zeros(1, 24)
    check(torch.cat((few, zeros, torch.randn(6, 24, generator=generator))).to(dtype), k, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [1, 3, 10, 30])
def test_sums_that_tie_only_after_rounding(backend: str, k: int) -> None:
    # Half a unit in the last place of 1e8 is 4: the small half decides, though no rounded sum shows it.
    generator = torch.Generator().manual_seed(k)
    rows = []
    for first, second in [(1e8, 1.0), (1.0, 1e8), (-1e8, 1.0), (1e8, 3.0)]:
        large = first * (1 + torch.randint(0, 2, (8, 10), generator=generator) * 2.0**-23)
        small = torch.randn(8, 10, generator=generator) * second
        rows.append(torch.cat((large, small), dim=-1))
    check(torch.cat(rows), k, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_signed_zeros_are_equal(backend: str) -> None:
    check(torch.tensor([[-0.0, 0.0, -0.0, 0.0, -0.0, 0.0], [0.0, -0.0, -0.0, -0.0, -0.0, -0.0]]), 4, backend)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126)
few = st.sampled_from([-1.0, 0.0, -0.0, 2.0**-24, 1.0, 1.0 + 2.0**-23, 3.0, 2.0**24])


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton is not installed, or not interpreting")
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 4), (9, 30), (9, 81)])
def test_many_nearly_equal_rows(n: int, k: int) -> None:
    """For an interpreter that takes as long for a row as for many, what `test_property` asks one by one."""
    generator = torch.Generator().manual_seed(n * k)
    odd = torch.tensor([-1.0, 0.0, -0.0, 2.0**-24, 1.0, 1.0 + 2.0**-23, 3.0, 2.0**24, 2.0**-149, -(2.0**126), 2.0**126])
    check(odd[torch.randint(0, len(odd), (64, 2 * n), generator=generator)], k, "triton")


@pytest.mark.parametrize("backend", DOUBLE)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_property(backend: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    k = data.draw(st.integers(1, n * n))
    element = data.draw(st.sampled_from([finite, few]))
    scores = data.draw(st.lists(element, min_size=2 * n, max_size=2 * n))
    check(torch.tensor([scores], dtype=torch.float32), k, backend)
    check(torch.tensor([scores], dtype=torch.float64), k, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 7, 20, 64])
def test_infinite_and_nan_scores_keep_the_slots_distinct(backend: str, dtype: torch.dtype, k: int) -> None:
    if dtype == torch.float64 and backend not in DOUBLE:
        pytest.skip("computes in float32")
    generator = torch.Generator().manual_seed(0)
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0, torch.finfo(dtype).max], dtype=dtype)
    scores = odd[torch.randint(0, 6, (50, 16), generator=generator)]
    values, index = product_key_topk(scores, k, backend=backend)
    assert bool((index[..., 1:] > index[..., :-1]).all())
    assert bool((index >= 0).all() and (index < 64).all())
    expected = product_key_topk(scores, k, backend="reference")
    assert torch.equal(index, expected[1])
    torch.testing.assert_close(values, expected[0], equal_nan=True, rtol=0, atol=0)
    with_nan = torch.tensor([[0.0, math.nan, 1.0, 0.0, 1.0, 2.0]], dtype=dtype)
    assert bool(product_key_topk(with_nan, 1, backend=backend)[0].isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "k"), [(6, 5), (4, 16), (5, 9)])
def test_gradients(backend: str, n: int, k: int) -> None:
    dtype = torch.float64 if backend in DOUBLE else torch.float32
    scores = torch.randn(3, 2 * n, dtype=dtype, generator=torch.Generator().manual_seed(n)).requires_grad_()
    if backend in DOUBLE:
        assert torch.autograd.gradcheck(lambda x: product_key_topk(x, k, backend=backend)[0], scores)
    values, index = product_key_topk(scores, k, backend=backend)
    assert not index.requires_grad
    weight = torch.randn_like(values)
    expected = product_key_topk(scores, k, backend="reference")[0]
    wanted = torch.autograd.grad((expected * weight).sum(), scores)[0]
    first = torch.autograd.grad((values * weight).sum(), scores, retain_graph=True)[0]
    second = torch.autograd.grad((values * weight).sum(), scores)[0]
    torch.testing.assert_close(first, wanted)
    assert torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32(backend: str, dtype: torch.dtype) -> None:
    scores = torch.randn(4, 20, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    values, index = product_key_topk(scores, 12, backend=backend)
    assert values.dtype == torch.float32
    values.sum().backward()
    assert scores.grad is not None
    assert scores.grad.dtype == dtype
    counts = torch.zeros(4, 20).scatter_add_(-1, torch.cat((index // 10, 10 + index % 10), -1), torch.ones(4, 24))
    assert torch.equal(scores.grad.float(), counts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_empty_and_grad_modes(backend: str) -> None:
    scores = torch.randn(4, 3, 20, generator=torch.Generator().manual_seed(0))
    expected = product_key_topk(scores, 12, backend="reference")
    view = scores.transpose(0, 1).contiguous().transpose(0, 1)
    strided = torch.stack((scores, scores), dim=-1).flatten(-2)[..., ::2]
    shifted = torch.cat((torch.zeros(1), scores.flatten()))[1:].view_as(scores)
    for x in (view, strided, shifted, scores.flatten()[:20], scores.requires_grad_()):
        rows = expected[1] if x.dim() == 3 else expected[1][0, 0]
        assert torch.equal(product_key_topk(x, 12, backend=backend)[1], rows)
    with torch.inference_mode():
        assert torch.equal(product_key_topk(scores, 12, backend=backend)[1], expected[1])
    with torch.no_grad():
        assert not product_key_topk(scores, 12, backend=backend)[0].requires_grad
    for shape in [(0, 20), (2, 0, 3, 20)]:
        empty = torch.zeros(shape, requires_grad=True)
        values, index = product_key_topk(empty, 5, backend=backend)
        assert values.shape == index.shape == (*shape[:-1], 5)
        values.sum().backward()
        assert empty.grad is not None
        assert empty.grad.shape == shape


@pytest.mark.parametrize("backend", DOUBLE)
def test_second_derivatives(backend: str) -> None:
    scores = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: product_key_topk(x, 5, backend=backend)[0].softmax(-1), scores)


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton is not installed, or not interpreting")
def test_second_derivatives_in_float32() -> None:
    scores = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    wanted, found = (
        torch.autograd.functional.hessian(
            lambda x, backend=backend: product_key_topk(x, 5, backend=backend)[0].softmax(-1)[:, 0].sum(), scores
        )
        for backend in ("reference", "triton")
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton is not installed, or not interpreting")
def test_more_than_a_program_can_sort_is_refused() -> None:
    with pytest.raises(ValueError, match=r"up to 8192 scores or sums at once, fewer than k = 2000 of 480 x 480 needs"):
        product_key_topk(torch.zeros(1, 960), 2000, backend="triton")
    with pytest.raises(ValueError, match=r"compute in float32, got torch\.float64"):
        product_key_topk(torch.zeros(1, 8, dtype=torch.float64), 2, backend="triton")


@pytest.mark.skipif("native" not in BACKENDS, reason="the compiled core is missing")
@pytest.mark.parametrize("k", [1, 48, 64, 200])
def test_threads_change_nothing(k: int) -> None:
    scores = torch.randn(301, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            values, index = product_key_topk(scores, k, backend="native")
            results.append((values, index, *torch.autograd.grad(values.square().sum(), scores)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    values, index = product_key_topk(scores, k, backend="chunked")
    assert torch.equal(results[0][1], index)
    torch.testing.assert_close(results[0][2], torch.autograd.grad(values.square().sum(), scores)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_to_one_graph(backend: str) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, index = product_key_topk(x, 9, backend=backend)
        return values.softmax(-1), index

    scores = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights, index = run(scores)
    expected, slots = product_key_topk(scores, 9, backend="reference")
    assert torch.equal(index, slots)
    torch.testing.assert_close(weights, expected.softmax(-1))
    (gradient,) = torch.autograd.grad(weights[:, 0].sum(), scores)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.softmax(-1)[:, 0].sum(), scores)[0])


def test_bad_input() -> None:
    scores = torch.zeros(3, 8)
    for bad, k, error, message in [
        ([1.0, 2.0], 1, TypeError, "scores must be a torch.Tensor, got list"),
        (scores.long(), 1, TypeError, r"scores must be a floating-point tensor, got torch\.int64"),
        (torch.zeros(3, 7), 1, ValueError, r"scores must be \[\.\.\., 2\*sqrt\(N\)\].*got shape \[3, 7\]"),
        (torch.zeros(3, 0), 1, ValueError, r"scores .*got shape \[3, 0\]"),
        (torch.tensor(1.0), 1, ValueError, r"scores .*got shape \[\]"),
        (scores, 0, ValueError, r"k must lie in \[1, N\] = \[1, 16\] for 8 scores, got 0"),
        (scores, 17, ValueError, "k must lie in .* got 17"),
        (scores, 2.0, TypeError, "k must be an integer, got float"),
        (scores, True, TypeError, "k must be an integer, got bool"),
    ]:
        with pytest.raises(error, match=message):
            product_key_topk(bad, k)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"backend must be one of .* got 'fast'"):
        product_key_topk(scores, 1, backend="fast")
