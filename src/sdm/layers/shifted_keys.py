"""Keys from the token before: what is written under a token is what came after it.

Shapes: B batch, T time, S streams (batch rows or documents), C channels.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from sdm.layers.gated_delta_net import GatedDeltaNet
from sdm.layers.interface import check_input
from sdm.layers.sparse_delta_memory import SparseDeltaMemory
from sdm.layers.state import LayerState, check_state
from sdm.layers.streams import streams_of
from sdm.layers.token_shift import shift


@dataclasses.dataclass
class ShiftedState(LayerState):
    """The state of the layer within, and the last token."""

    inner: LayerState
    previous: Tensor  # [S,C]


class ShiftedKeys(nn.Module):
    """A memory whose keys come from the previous token's input, its values and queries from the current one's.

    Asking for a token then finds what followed it earlier, from the first step of training on if W_q starts equal to
    W_k. Large models find this by themselves through their local layers; it is not part of the paper's models.
    """

    def __init__(self, layer: SparseDeltaMemory | GatedDeltaNet) -> None:
        super().__init__()
        self.layer = layer
        self.hidden_size = layer.hidden_size

    def forward(
        self,
        x: Tensor,
        state: ShiftedState | None = None,
        return_state: bool = False,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ShiftedState]:
        """Mix a stretch of tokens, as every `sdm.layers.interface.SequenceLayer` does."""
        check_input(x, self.hidden_size)
        streams = streams_of(x, attention_mask, cu_seqlens)
        if state is not None:
            check_state(state, ShiftedState, streams.count, x.device, previous=(self.hidden_size,))
        shifted, previous = shift(streams.align(x), None if state is None else state.previous, streams)
        mixed = self.layer(
            x,
            state=None if state is None else state.inner,
            return_state=return_state,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            key_input=streams.restore(shifted),
        )
        if not return_state:
            return mixed
        y, after = mixed
        return y, ShiftedState(after, previous)

    @torch.no_grad()
    def step_(self, x: Tensor, state: ShiftedState) -> Tensor:
        """Decode one token: x [B,hidden_size] gives y of the same shape; `state` changes in place."""
        check_input(x, self.hidden_size, "[B,hidden_size]")
        check_state(state, ShiftedState, x.shape[0], x.device, previous=(self.hidden_size,))
        y = self.layer.step_(x, state.inner, key_input=state.previous.to(x.dtype))  # type: ignore[arg-type]
        state.previous.copy_(x)
        return y

    def start_state(self, batch_size: int, learn: bool = False) -> ShiftedState:
        """The state of streams without tokens, as every `sdm.layers.interface.SequenceLayer` has it."""
        previous = self.layer.key_proj.weight.new_zeros(batch_size, self.hidden_size)
        return ShiftedState(self.layer.start_state(batch_size, learn), previous)

    def sparse_tables(self) -> dict[str, SparseDeltaMemory]:
        """As `SparseDeltaMemory.sparse_tables`."""
        if isinstance(self.layer, SparseDeltaMemory):
            return {f"inner.{name}": layer for name, layer in self.layer.sparse_tables().items()}
        return {}
