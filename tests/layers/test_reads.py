"""Readings taken apart: the parts of every mixer give its own output, alone, padded, and behind a state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sdm.layers import (
    FullAttention,
    GatedDeltaNet,
    KimiDeltaAttention,
    Mamba2,
    ShiftedKeys,
    SlidingWindowAttention,
    SparseDeltaMemory,
    TokenShift,
)
from sdm.layers.reads import Reads, has_reads, layer_reads

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sdm": lambda: SparseDeltaMemory(32, 2, num_slots=16, num_writes=4, num_reads=4),
    "slot rule": lambda: SparseDeltaMemory(32, 1, 64, num_writes=4, num_reads=6, update="slot", decay_per_write=True),
    "gdn": lambda: GatedDeltaNet(32, 2),
    "kda": lambda: KimiDeltaAttention(32, 2),
    "linear attention": lambda: GatedDeltaNet(32, 2, correction=False),
    "mamba2": lambda: Mamba2(32, 2),
    "grouped mamba2": lambda: Mamba2(32, 4, num_groups=2),
    "shifted sdm": lambda: ShiftedKeys(SparseDeltaMemory(32, num_slots=16, num_writes=4, num_reads=4)),
    "convolved gdn": lambda: ShiftedKeys(GatedDeltaNet(32, 2), taps=3),
    "full attention": lambda: FullAttention(32, 4, 2),
    "sliding attention": lambda: SlidingWindowAttention(32, 4, window=7),
}
MASKS = {"whole": None, "padded": torch.tensor([[0] * 5 + [1] * 35, [1] * 30 + [0] * 10])}


def output(layer: nn.Module, x: Tensor, reads: Reads) -> Tensor:
    inner = layer.layer if isinstance(layer, ShiftedKeys) else layer
    if isinstance(inner, Mamba2):
        assert reads.tokens is not None
        return inner._output(x, reads.readings.to(x.dtype), reads.tokens.value)
    return inner._output(x, reads.readings.to(x.dtype))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_parts_give_the_layer_its_output(name: str, mask: Tensor | None) -> None:
    torch.manual_seed(0)
    layer, x, more = LAYERS[name](), torch.randn(2, 40, 32), torch.randn(2, 9, 32)
    y, state = layer(x, return_state=True, attention_mask=mask)
    reads = layer_reads(layer, x, None, mask)
    assert reads.error() <= 1e-6
    valid = torch.ones(2, 40) if mask is None else mask
    torch.testing.assert_close(output(layer, x, reads) * valid.unsqueeze(-1), y, rtol=0, atol=1e-6)
    dense = reads.read_map.dense()
    assert not dense.triu(1).any()
    assert not (dense * (1 - valid[:, None, :, None])).any()
    assert not (dense * (1 - valid[:, None, None, :])).any()
    # Onward from the state, whose past is one more source.
    onward = layer_reads(layer, more, state)
    assert onward.error() <= 1e-6
    assert onward.before.abs().sum() > 0
    torch.testing.assert_close(output(layer, more, onward), layer(more, state=state), rtol=0, atol=1e-6)


def test_attention_weights_sum_to_one() -> None:
    reads = layer_reads(SlidingWindowAttention(32, 4, window=7), torch.randn(1, 20, 32))
    torch.testing.assert_close(reads.read_map.dense().sum(-1), torch.ones(1, 4, 20, dtype=torch.float64))
    assert int((reads.read_map.dense()[0, 0, 19] > 0).sum()) == 7


@pytest.mark.parametrize("name", LAYERS)
def test_a_wrong_part_shows_in_the_error(name: str) -> None:
    torch.manual_seed(0)
    reads = layer_reads(LAYERS[name](), torch.randn(1, 20, 32))
    reads.delta[0, 3] *= 1.5
    assert reads.error() > 1e-3


def test_layers_without_a_map_say_so() -> None:
    layer = TokenShift(32)
    assert not has_reads(layer)
    with pytest.raises(TypeError, match="TokenShift"):
        layer_reads(layer, torch.randn(1, 4, 32))
