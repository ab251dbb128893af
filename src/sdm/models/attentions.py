"""`output_attentions=True`: the map of every mixer from reading tokens to the tokens that they read, as dense tensors.

Attention gives its weights. A sparse delta memory and a gated delta net give S of `sdm.layers.reads`: how much of what
token l wrote is in the reading of token t. Rows of S do not add up to 1, and what the learned initial state contributes
is in no column. `sdm.analysis.trace` gives the same maps in sparse form, with the other parts of a reading.

Shapes: B batch, H heads, T time, P keys before the first token, S all tokens of the stream.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sdm.layers.memory_statistics import evaluating
from sdm.layers.reads import Reads, has_reads, layer_reads
from sdm.layers.state import LayerState

MAX_LENGTH = 4096
"""Longest stream that dense maps are made for: a head takes 64 MiB in float32 there."""


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
