"""What the mixers of a model read: `sdm.layers.reads` on the inputs that the mixers get in the model, and the maps of
`output_attentions=True`.

The map of a mixer leads from reading tokens to the tokens that they read. Attention gives its weights. A sparse delta
memory and a gated delta net give S of `sdm.layers.reads`: how much of what token l wrote is in the reading of token t.
Rows of S do not add up to 1, and what the learned initial state contributes is in no column. `sdm.analysis.trace` gives
the same maps in sparse form, with the other parts of a reading.

Shapes: B batch, H heads, T time, P keys before the first token, S all tokens of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sdm.layers.memory_statistics import evaluating
from sdm.layers.reads import Reads, has_reads, layer_reads
from sdm.layers.state import LayerState
from sdm.models.cache import SDMCache

if TYPE_CHECKING:
    from sdm.models.modeling import SDMBlock, SDMModel


MAX_LENGTH = 4096
"""Longest stream that dense maps are made for: a head takes 64 MiB in float32 there."""


@torch.no_grad()
def model_reads(model: SDMModel, input_ids: Tensor, blocks: Mapping[int, SDMBlock]) -> Iterator[tuple[int, Reads]]:
    """Take the readings of some blocks of a model on new texts apart, one block at a time.

    Args:
        model: the model without its head.
        input_ids: [B,T].
        blocks: by their numbers, those to take apart; all must have a map (`sdm.layers.reads.has_reads`).
    """
    with evaluating(model):
        with captured_inputs(blocks) as inputs:
            model(input_ids=input_ids, past_key_values=SDMCache(model.config), use_cache=True)
        for index, block in blocks.items():
            yield index, layer_reads(block.mixer, inputs.pop(index))


@contextmanager
def captured_inputs(blocks: Mapping[int, SDMBlock]) -> Iterator[dict[int, Tensor]]:
    """Collect what the mixers of these blocks are given in the forward passes inside of the `with` block."""
    inputs: dict[int, Tensor] = {}
    handles = [
        block.mixer_norm.register_forward_hook(lambda module, args, output, i=i: inputs.__setitem__(i, output))
        for i, block in blocks.items()
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def check_length(tokens: int) -> None:
    """Raise a ValueError for a stream that is too long for dense maps."""
    if tokens > MAX_LENGTH:
        raise ValueError(
            f"output_attentions makes a number for every two tokens, for up to {MAX_LENGTH} tokens; the stream has "
            f"{tokens}. sdm.analysis.trace makes sparse maps of longer ones"
        )


@torch.no_grad()
def attention_map(
    mixer: nn.Module, x: Tensor, state: LayerState | None, mask: Tensor | None, past_mask: Tensor | None, past: int
) -> Tensor:
    """Return the map of one mixer on x [B,T,hidden_size]. Nothing changes, and there is no gradient.

    Args:
        mixer: any mixer. One without a map (token shift, product-key memory) gives a tensor without heads.
        x: what the mixer is given.
        state: its state before x.
        mask: [B,T], False on padding.
        past_mask: [B,past] of the tokens before x; None: none of them is padding.
        past: tokens of the stream before x.

    Returns:
        [B,H,T,past + T]. A memory does not know the single tokens of its past: there, their columns are NaN.
    """
    time = x.shape[1]
    if not has_reads(mixer):
        return x.new_zeros(len(x), 0, time, past + time)
    with evaluating(mixer):
        reads = layer_reads(mixer, x, state, mask)
    return torch.cat((_past_columns(reads, past, past_mask), reads.read_map.dense()), dim=-1).to(x)


def _past_columns(reads: Reads, past: int, past_mask: Tensor | None) -> Tensor:
    batch, heads, time = reads.read_map.shape
    if reads.past_weight is None or reads.past_position is None:
        return torch.full((batch, heads, time, past), torch.nan, dtype=torch.float64)
    columns = torch.zeros(batch, heads, time, past, dtype=torch.float64)
    for row, (weight, position) in enumerate(zip(reads.past_weight.cpu(), reads.past_position.cpu(), strict=True)):
        held = position >= 0
        place = position[held]
        if past_mask is not None:  # keys have positions without padding
            place = past_mask[row].cpu().nonzero().squeeze(1)[place]
        columns[row, :, :, place] = weight[..., held].double()
    return columns
