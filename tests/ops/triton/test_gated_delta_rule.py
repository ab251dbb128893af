"""The kernels of the gated delta rule, interpreted: against the reference, and what they refuse.

`tests/ops/test_gated_delta_rule.py` runs over them too, as slow tests; `test_emulated.py` runs them compiled.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import cpu_backends
from sdm.ops import gated_delta_rule
from sdm.ops.sequences import PackedChunks
from sdm.ops.triton.launch import record

pytestmark = pytest.mark.skipif("triton" not in cpu_backends("gated_delta_rule"), reason="needs TRITON_INTERPRET=1")


def make(sizes: tuple[int, ...], by_channel: bool, documents: list[int] | None) -> tuple[list[Tensor], Tensor | None]:
    """query, key, value, beta, log_decay and the initial state; and the bounds of documents."""
    B, T, H, K, D = sizes
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key = (torch.nn.functional.normalize(normal(B, T, H, K), dim=-1) for _ in range(2))
    decay = -0.2 * normal(B, T, H, *((K,) if by_channel else ())).abs()
    state = normal(B if documents is None else len(documents) - 1, H, K, D)
    bounds = None if documents is None else torch.tensor(documents)
    return [query, key, normal(B, T, H, D), normal(B, T, H).sigmoid(), decay, state], bounds


def run(inputs: list[Tensor], bounds: Tensor | None, backend: str) -> list[Tensor]:
    """Output, final state and the gradients of all inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y, final = gated_delta_rule(
        *leaves[:5], initial_state=leaves[5], output_final_state=True, cu_seqlens=bounds, backend=backend
    )
    assert final is not None
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (y, final)]
    return [y.detach(), final.detach(), *torch.autograd.grad([y, final], leaves, grads)]


@pytest.mark.parametrize(
    ("sizes", "by_channel", "documents"),
    [
        ((2, 70, 2, 5, 20), False, None),
        ((1, 40, 1, 70, 7), True, None),
        ((1, 90, 2, 6, 9), False, [0, 0, 7, 71, 90, 90]),
        ((1, 33, 1, 66, 5), True, [0, 16, 33]),
        ((2, 1, 1, 3, 4), False, None),
    ],
)
def test_matches_the_reference(sizes: tuple[int, ...], by_channel: bool, documents: list[int] | None) -> None:
    """Chunks of 64 and of 16 tokens, short rows, documents that are empty or fill chunks."""
    inputs, bounds = make(sizes, by_channel, documents)
    expected = run([x.double() for x in inputs], bounds, "reference")
    for got, want in zip(run(inputs, bounds, "triton"), expected, strict=True):
        assert float((got - want).abs().max()) <= 1e-6 * float(want.abs().max())


def test_calls_without_tokens() -> None:
    inputs, _ = make((2, 0, 1, 3, 4), False, None)
    y, final = gated_delta_rule(*inputs[:5], initial_state=inputs[5], output_final_state=True, backend="triton")
    assert y.shape == (2, 0, 1, 4)
    assert torch.equal(final, inputs[5])


def test_launches_two_kernels_and_reads_no_value() -> None:
    """At any length, with packed documents: on tensors without memory, where reading raises."""
    for time in (64, 2**17):
        floats = [torch.empty(1, time, 2, *x, device="meta", requires_grad=True) for x in ((8,), (8,), (32,), (), ())]
        bounds = torch.empty(6, dtype=torch.int64, device="meta")
        with record() as launches:
            gated_delta_rule(*floats, cu_seqlens=bounds, backend="triton")[0].sum().backward()
        assert [launch.name for launch in launches] == ["carry_kernel", "carry_backward_kernel"]
        assert launches[0].grid == (5 * 2 * 2,)  # documents, heads, slabs of 16 channels


def test_bounds_that_no_documents_have_lead_nowhere() -> None:
    """On a GPU nobody reads them: they are cut to the row and put into order."""
    for bounds in ([5, 19, 3, 22], [0, -7, 99, 22], [22, 0, 22, 0], [3, 2**40, 1, -(2**40)]):
        place, slot, chunks = PackedChunks.of_any_bounds(torch.tensor(bounds), 22, 16, torch.device("cpu"))
        assert 0 <= int(place.min()) <= int(place.max()) <= 22
        assert 0 <= int(slot.min()) <= int(slot.max()) < len(place)
        assert bool((chunks.diff() >= 0).all())
        assert 16 * int(chunks[-1]) <= len(place)


def test_what_it_refuses() -> None:
    inputs, _ = make((1, 3, 1, 129, 4), False, None)
    with pytest.raises(ValueError, match="hold states of up to 128 key channels, got 129; use"):
        gated_delta_rule(*inputs[:5], backend="triton")
    inputs, _ = make((1, 3, 1, 4, 4), False, None)
    leaves = [x.requires_grad_() for x in inputs[:5]]
    y, _ = gated_delta_rule(*leaves, backend="triton")
    first = torch.autograd.grad(y.square().sum(), leaves[2], create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="second derivatives of gated_delta_rule"):
        torch.autograd.grad(first.sum(), leaves[0])
