"""Nothing on a GPU waits for the host: decode steps, packed training and flex_attention, on tensors without memory.

A meta tensor refuses whatever would read a value, as a CUDA graph that is being captured does. Only the device's own
kernels are missing here: their launches are recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from sdm.layers import FullAttention, SlidingWindowAttention, flex_attention, full_attention
from sdm.layers.full_attention import GrowingKeyValues
from sdm.models import SDMCache, SDMForCausalLM
from sdm.models.likelihood import next_token_targets
from sdm.ops.triton.availability import missing_because, version
from sdm.ops.triton.launch import record
from tiny_models import STACKS, tiny_config

pytestmark = [
    pytest.mark.skipif(bool(missing_because(version())), reason=missing_because(version()) or "Triton is there"),
    # torch's own, of flex_attention where it is not compiled.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
WIDE = {"hidden_size": 64, "num_attention_heads": 4}  # flex_attention takes heads of 16 channels and more
# FwPKM takes a gradient step where a stream has filled a chunk, which only the numbers say.
STEPPING = [stack for stack in STACKS if stack != "fwpkm"]


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither autocast nor torch's check of flex_attention's device knows meta tensors."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    with record():
        yield


def meta_model(stack: str, **fields: Any) -> SDMForCausalLM:
    with torch.device("meta"):
        return SDMForCausalLM(tiny_config(stack, **fields))


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device="meta")


def test_reading_a_value_raises() -> None:
    """The guard itself."""
    for read in (bool, int, torch.Tensor.tolist, torch.nonzero):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(ids(1))


@pytest.mark.parametrize("stack", STEPPING)
@torch.no_grad()
def test_prefill_and_decode_read_no_value(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if stack != "mixed":  # tracing flex_attention takes seconds
        monkeypatch.setattr(flex_attention, "serves", lambda query: False)
    model = meta_model(stack, **WIDE)
    cache = SDMCache(model.config)
    for tokens in (7, 1, 1, 3, 1):
        assert model(ids(2, tokens), past_key_values=cache).logits.shape[:2] == (2, tokens)


@pytest.mark.parametrize("stack", STEPPING)
def test_packed_training_reads_no_value(stack: str) -> None:
    model = meta_model(stack, **WIDE)
    model(ids(1, 12), labels=ids(1, 12), cu_seqlens=ids(4)).loss.backward()
    assert all(x.grad is not None for x in model.parameters())


def test_ends_of_documents_have_no_target() -> None:
    """Empty documents first, in between and last; and what next_token_targets said with numbers on the host."""
    labels = torch.arange(20, 27).view(1, 7)
    bounds = torch.tensor([0, 0, 3, 3, 6, 7, 7])
    assert next_token_targets(labels, bounds).tolist() == [[21, 22, -100, 24, 25, -100, -100]]
    assert next_token_targets(labels[:, :0], torch.tensor([0, 0])).shape == (1, 0)


@torch.no_grad()
def test_full_attention_steps_on_a_device_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of different lengths, from a prefill on, over several growths of the buffer; the device is asked once,
    for the state that came from elsewhere."""
    torch.manual_seed(0)
    layer = FullAttention(32, num_heads=4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    _, before = layer(torch.randn(2, 5, 32), return_state=True, attention_mask=mask)
    x = torch.randn(80, 2, 32)
    expected_state = before.map(torch.clone)
    expected = torch.stack([layer.step_(token, expected_state) for token in x])

    state = GrowingKeyValues(**before.map(torch.clone).tensors())
    monkeypatch.setattr(full_attention, "reading_is_free", lambda length: False)
    assert state._room is None
    outputs = []
    for place, token in enumerate(x):
        state = state.map(lambda x: x)  # as a cache does before each step
        outputs.append(layer.step_(token, state))
        assert state._room == state.key.shape[2] - int(state.length.max()), place
    torch.testing.assert_close(torch.stack(outputs), expected)
    assert 85 <= state.key.shape[2] <= 148
    # Several tokens at once continue from there, in a buffer of the exact size.
    more = torch.randn(2, 3, 32)
    torch.testing.assert_close(layer.extend_(more, state), layer.extend_(more, expected_state))
    assert state.key.shape[2] == 88


@torch.no_grad()
def test_reserved_buffers_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured graph needs: neither shapes nor addresses change."""
    monkeypatch.setattr(full_attention, "reading_is_free", lambda length: False)
    layer = FullAttention(32, num_heads=4)
    _, state = layer(torch.randn(1, 5, 32), return_state=True)
    state.reserve_(70)
    places = [x.data_ptr() for x in state.tensors().values()]
    for _ in range(70):
        layer.step_(torch.randn(1, 32), state)
        assert [x.data_ptr() for x in state.tensors().values()] == places
    assert state.room == 0
    layer.step_(torch.randn(1, 32), state)
    assert state.key.shape[2] == 150


INTERVALS = {
    "window, two rows": (2, 300, 64, 2, 2, lambda: torch.randint(1, 66, (2, 300))),
    "documents, shared heads": (1, 700, 0, 4, 2, lambda: _within_documents([0, 100, 450, 700])),
    "short": (2, 5, 8, 1, 1, lambda: torch.randint(1, 10, (2, 5))),
    "whole blocks": (1, 256, 128, 2, 2, lambda: torch.full((1, 256), 129)),
}


def _within_documents(bounds: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(1, end - start + 1) for start, end in itertools.pairwise(bounds)])[None]


def _case(name: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Query, key and value; the visible places; and the mask [B,T,L] that they mean."""
    torch.manual_seed(0)
    batch, time, history, heads, groups, visible = INTERVALS[name]
    visible = visible()
    query = torch.randn(batch, time, heads, 16)
    key, value = torch.randn(2, batch, history + time, groups, 16)
    distance = torch.arange(history, history + time)[:, None] - torch.arange(history + time)
    return [query, key, value], visible, (distance >= 0) & (distance < visible[..., None])


def _masked(inputs: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    query, key, value = (x.transpose(1, 2) for x in inputs)
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask[:, None], enable_gqa=True)
    return mixed.transpose(1, 2)


@pytest.mark.parametrize("name", INTERVALS)
def test_flex_attention_is_masked_attention(name: str) -> None:
    """Outputs and gradients, uncompiled; and every key that a block of queries sees is in one of its blocks."""
    inputs, visible, mask = _case(name)
    leaves = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
    y = flex_attention.interval_attention(*leaves[0], visible)
    assert y is not None
    expected = _masked(leaves[1], mask)
    torch.testing.assert_close(y, expected)
    for grads in zip(
        *(torch.autograd.grad(y.square().sum(), x) for y, x in zip((y, expected), leaves, strict=True)), strict=True
    ):
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    counts, blocks = flex_attention._blocks(visible, inputs[1].shape[1] - inputs[0].shape[1])
    for row, seen in enumerate(mask):
        for block, queries in enumerate(seen.split(flex_attention.BLOCK)):
            wanted = set((queries.any(0).nonzero().squeeze(1) // flex_attention.BLOCK).tolist())
            listed = blocks[row, block, : counts[row, block]].tolist()
            assert wanted <= set(listed)
            assert len(set(listed)) == len(listed)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_flex_attention_is_masked_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that skips blocks, as torch compiles it for a CPU."""
    monkeypatch.setattr(flex_attention, "_attention", lambda query: flex_attention._compiled())
    for name in INTERVALS:
        inputs, visible, mask = _case(name)
        torch.testing.assert_close(flex_attention.interval_attention(*inputs, visible), _masked(inputs, mask))


def test_layers_give_the_same_with_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, padding, packed documents, and a state to continue from."""
    torch.manual_seed(0)
    x, bounds = torch.randn(1, 40, 64), torch.tensor([0, 9, 9, 30, 40])
    for layer in (SlidingWindowAttention(64, 4, window=7), FullAttention(64, 4)):
        _, state = layer(x[:, :11], return_state=True)
        calls: list[dict[str, Any]] = [{}, {"cu_seqlens": bounds}, {"attention_mask": torch.arange(40)[None] > 4}]
        calls.append({"state": state, "return_state": True})
        expected = [layer(x, **call) for call in calls]
        with monkeypatch.context() as patched:
            used = []
            patched.setattr(flex_attention, "serves", lambda query, used=used: used.append(1) is None)
            for call, before in zip(calls, expected, strict=True):
                now, then = layer(x, **call), before
                if call.get("return_state"):
                    torch.testing.assert_close(now[1].key, then[1].key)
                    now, then = now[0], then[0]
                torch.testing.assert_close(now, then)
            assert used


def test_a_kernel_that_does_not_compile_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise torch._dynamo.exc.InternalTorchDynamoError("no such GPU")

    monkeypatch.setattr(flex_attention, "_failures", [])
    monkeypatch.setattr(flex_attention, "_attention", lambda query: fail)
    inputs, visible, _ = _case("short")
    assert flex_attention.serves(torch.empty(1, 1, 1, 16, device="meta"))
    assert flex_attention.interval_attention(*inputs, visible) is None
    assert "no such GPU" in caplog.text
    assert not flex_attention.serves(torch.empty(1, 1, 1, 16, device="meta"))
    # Errors of the caller are not taken for that.
    monkeypatch.setattr(flex_attention, "_attention", lambda query: lambda *x, **y: torch.ones(2) + torch.ones(3))
    with pytest.raises(RuntimeError, match="must match"):
        flex_attention.interval_attention(*inputs, visible)
