"""The attention layers against attention written out, their cost, their states, and the rotary positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import assert_close
from sdm.layers import FullAttention, SlidingWindowAttention
from sdm.layers.attention import GatedAttention
from sdm.layers.rope import Rope, rotate, rotation

SIZE = 32


def written_out(layer: GatedAttention, x: Tensor, window: int) -> Tensor:
    """One softmax per query over all keys, the invisible ones at minus infinity."""
    time = x.shape[1]
    heads, head_dim = layer.num_heads, layer.head_dim
    query, key, value = (
        F.linear(x, proj.weight).unflatten(-1, (-1, head_dim))
        for proj in (layer.query_proj, layer.key_proj, layer.value_proj)
    )
    query, key = (rotate(part, *rotation(torch.arange(time), head_dim, layer.rope)) for part in (query, key))
    key, value = (part.repeat_interleave(heads // layer.num_kv_heads, dim=2) for part in (key, value))
    scores = torch.einsum("bthd,bshd->bhts", query, key) / head_dim**0.5
    distance = torch.arange(time)[:, None] - torch.arange(time)
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    mixed = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), value)
    return layer.out_proj(mixed.flatten(-2) * torch.sigmoid(layer.gate_proj(x)))


@pytest.mark.parametrize("window", [1, 2, 7, 16, 33, 50, 64, 200])
def test_sliding_window_is_masked_attention(window: int) -> None:
    layer = SlidingWindowAttention(SIZE, 4, window).double()
    x = torch.randn(2, 50, SIZE, dtype=torch.float64)
    assert_close([layer(x)], [written_out(layer, x, window)], 1e-10)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_full_attention_is_masked_attention(kv_heads: int) -> None:
    layer = FullAttention(SIZE, 4, kv_heads).double()
    x = torch.randn(2, 50, SIZE, dtype=torch.float64)
    assert_close([layer(x)], [written_out(layer, x, 50)], 1e-10)


def test_several_query_blocks_on_a_filled_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdm.layers.full_attention.QUERY_BLOCK", 4)
    layer = FullAttention(SIZE, 4, 2).double()
    x = torch.randn(3, 40, SIZE, dtype=torch.float64)
    mask = torch.ones(3, 30, dtype=torch.bool)
    mask[1, 7:] = False
    with torch.no_grad():
        _, state = layer(x[:, :30], return_state=True, attention_mask=mask)
        y = layer(x[:, 30:], state)
        for row in range(3):
            kept = torch.cat((x[row, :30][mask[row]], x[row, 30:])).unsqueeze(0)
            assert_close([y[row : row + 1]], [layer(kept)[:, -10:]], 1e-10)


def flops(layer: Any, time: int, state: Any = None) -> int:
    # The counter does not know the fused kernel of CPUs.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, time, SIZE), state, return_state=True)
    return counter.get_total_flops()


def largest_tensor(layer: Any, time: int) -> int:
    """Elements of the largest tensor that a forward and backward pass makes."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                largest = max(largest, x.numel() if isinstance(x, Tensor) else 0)
            return out

    with Watch():
        layer(torch.randn(1, time, SIZE)).sum().backward()
    return largest


@pytest.mark.parametrize("filled", [False, True])
def test_sliding_window_cost_is_linear(filled: bool) -> None:
    layer = SlidingWindowAttention(SIZE, 4, window=16)
    state = layer.start_state(1) if filled else None
    short, long = flops(layer, 512, state), flops(layer, 4096, state)
    assert short > 5 * 2 * 512 * SIZE**2  # more than the projections: the attention itself is counted
    assert long <= 8 * short
    assert largest_tensor(layer, 4096) == 8 * largest_tensor(layer, 512)


def test_full_attention_keeps_no_square_tensor() -> None:
    """The scores of a prefill exist block by block inside the kernel."""
    layer = FullAttention(SIZE, 4, 2)
    assert largest_tensor(layer, 1024) < 2 * 1024 * SIZE


def test_a_window_is_all_that_is_kept() -> None:
    layer = SlidingWindowAttention(SIZE, 2, window=8)
    state = layer.start_state(3)
    before = [part.data_ptr() for part in state.tensors().values()]
    for _ in range(20):
        layer.step_(torch.randn(3, SIZE), state)
    assert [part.data_ptr() for part in state.tensors().values()] == before
    assert state.key.shape == state.value.shape == (3, 2, 8, SIZE // 2)
    assert state.length.tolist() == [20, 20, 20]
    _, after = layer(torch.randn(3, 100, SIZE), return_state=True)
    assert after.key.shape == (3, 2, 8, SIZE // 2)


def test_the_buffer_of_full_attention_doubles() -> None:
    layer = FullAttention(SIZE, 2, 1)
    _, state = layer(torch.randn(1, 50, SIZE), return_state=True)
    capacities, copies = set(), 0
    for _ in range(101):
        before = state.key.data_ptr()
        layer.step_(torch.randn(1, SIZE), state)
        capacities.add(state.key.shape[2])
        copies += state.key.data_ptr() != before
    assert capacities == {100, 200}
    assert copies == 2
    # A stretch of tokens leaves the spare places behind.
    _, state = layer(torch.randn(1, 5, SIZE), state, return_state=True)
    assert state.key.shape[2] == 156


def test_rotation_is_relative_and_exact_far_out() -> None:
    query, key = torch.randn(2, 1, 1, 64, dtype=torch.float64)

    def score(position: int, distance: int) -> Tensor:
        turned_query = rotate(query, *rotation(torch.tensor([position]), 64, Rope(500_000.0)))
        return (turned_query * rotate(key, *rotation(torch.tensor([position - distance]), 64, Rope(500_000.0)))).sum()

    for distance in (0, 3, 100):
        near = score(200, distance)
        for position in (5000, 1_000_000, 100_000_000):
            assert abs(score(position, distance) - near) < 1e-4
    assert abs(score(7, 0) - (query * key).sum()) < 1e-6


def test_rotation_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, position = torch.randn(2, 9, 3, 16), torch.arange(9).expand(2, 9)
    angle = position.unsqueeze(-1) * 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
    angle = torch.cat((angle, angle), dim=-1)
    expected, _ = apply_rotary_pos_emb(x, x, angle.cos(), angle.sin(), unsqueeze_dim=2)
    torch.testing.assert_close(rotate(x, *rotation(position, 16, Rope(10_000.0))), expected, atol=1e-5, rtol=1e-5)


def parameters(layer: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def test_sizes_of_the_paper() -> None:
    with torch.device("meta"):
        local, full, odd = SlidingWindowAttention(768), FullAttention(768), FullAttention(1920)
        assert (local.num_heads, local.head_dim, local.window) == (6, 128, 128)
        assert parameters(local) == 5 * 768**2
        assert (full.num_heads, full.num_kv_heads) == (6, 3)
        assert parameters(full) == 4 * 768**2
        assert (odd.num_heads, odd.num_kv_heads) == (15, 5)


def test_bad_construction() -> None:
    for arguments, message in (
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        ({"hidden_size": 32, "num_heads": 3}, "hidden_size = 32 must be divisible by num_heads = 3"),
        ({"hidden_size": 33, "num_heads": 11}, "must be even, got 3"),
        ({"hidden_size": 32, "rope_theta": 0}, "rope_theta must be positive, got 0"),
    ):
        for kind in (SlidingWindowAttention, FullAttention):
            with pytest.raises(ValueError, match=message):
                kind(**arguments)
    with pytest.raises(ValueError, match="window must be a positive integer, got 0"):
        SlidingWindowAttention(32, window=0)
    for kv_heads, message in ((0, "num_kv_heads must be a positive integer"), (3, "divisible by num_kv_heads = 3")):
        with pytest.raises(ValueError, match=message):
            FullAttention(32, 4, kv_heads)


def test_a_state_of_another_layer_is_refused() -> None:
    x = torch.randn(2, 3, SIZE)
    layer = SlidingWindowAttention(SIZE, 2, window=8)
    with pytest.raises(ValueError, match="window = 8 keys, got 9"):
        layer(x, SlidingWindowAttention(SIZE, 2, window=9).start_state(2))
    with pytest.raises(ValueError, match=r"state\.key must be of this layer"):
        layer(x, FullAttention(SIZE, 2, 1).start_state(2))
    with pytest.raises(TypeError, match="state must be a KeyValueState or None, got Tensor"):
        layer.step_(x[:, 0], torch.zeros(2))
