"""The host code of the Triton backends looks at shapes, never at values, and launches a few kernels at any length.

It runs on tensors without memory, at level 13 of the ladder. There `.item()`, `.tolist()`, `bool(...)`, `.cpu()` and
shapes that depend on data raise, and nothing can wait for a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sdm.ops import available_backends

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
needs_rule = pytest.mark.skipif("triton" not in available_backends(), reason="the rule has no Triton backend here")


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


@pytest.mark.parametrize("look", [lambda x: x.item(), lambda x: x.tolist(), bool, lambda x: x.cpu(), torch.nonzero])
def test_looking_at_values_raises(look) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((RuntimeError, NotImplementedError)):
        look(torch.ones(1, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection_takes_two_launches_and_one_backward(dtype: torch.dtype) -> None:
    from benchmarks._triton_cases import launches_of, topk

    for level, time in ((1, 1), (13, 2048), (13, 2**20)):
        names = [x.name for x in launches_of(lambda level=level, time=time: topk(level, dtype, time))]
        assert names == ["rank_halves_kernel", "select_kernel", "gather_gradient_kernel"]


@needs_rule
@pytest.mark.parametrize("update", ["delta", "slot"])
def test_the_rule_takes_at_most_six_launches_at_any_length(update: str) -> None:
    from benchmarks._triton_cases import launches_of, rule

    counts = {
        len(launches_of(lambda time=time: rule(13, torch.float32, time, update, training=False)))
        for time in (1, 100, 2048, 2**18)
    }
    assert len(counts) == 1
    assert counts.pop() <= 6


@needs_rule
def test_backward_launches_nothing_per_chunk() -> None:
    from benchmarks._triton_cases import launches_of, rule

    short, long = (len(launches_of(lambda time=time: rule(1, torch.float32, time))) for time in (256, 2048))
    assert short == long


@needs_rule
def test_a_step_is_one_launch() -> None:
    from benchmarks._triton_cases import launches_of, step

    assert len(launches_of(lambda: step(13, torch.bfloat16))) == 1


def test_traced_lengths_stay_symbols() -> None:
    """A graph of forward and backward is for every length: nothing loops over the length of its example."""
    from torch.fx.experimental.proxy_tensor import make_fx

    B, T, H, W, R, N, D = 1, 40, 1, 4, 4, 16, 8
    slots = torch.arange(W).expand(B, T, H, W).contiguous()
    floats = [torch.rand(B, T, H, *shape) for shape in ((W,), (D,), (), (), (R,))]
    tokens = [slots, floats[0], floats[1], floats[2], -floats[3], slots, floats[4]]

    def both(*tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tokens]
        op = torch.ops.sdm.sparse_delta_rule_triton
        y, _, _ = op(*leaves, torch.zeros(H, N, D), N, None, False, False, True, 192.0, 8, "planned")
        return torch.autograd.grad(y.sum(), [x for x in leaves if x.requires_grad])

    graph = make_fx(both, tracing_mode="symbolic")(*tokens)
    assert any("triton_backward" in str(node.target) for node in graph.graph.nodes)
    length = next(iter(graph.graph.nodes)).meta["val"].shape[1]
    assert str(length.node.expr) != str(T)
    assert not [guard for guard in graph.shape_env.guards if length.node.expr in guard.expr.free_symbols]
