"""The smallest local layer: each token sees itself and the one before.

Shapes: B batch, T time, S streams (batch rows or documents), C channels.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from sdm.errors import check_size
from sdm.layers.interface import Streams, check_input, documents_of, streams_of, without_weight_decay
from sdm.layers.state import LayerState, Record, Undo, check_state


@dataclasses.dataclass
class PreviousToken(LayerState):
    """The state of a shift."""

    previous: Tensor  # [S,C] the last input; zeros before the first

    def _undo_type(self) -> type[Undo]:
        return PreviousUndo

    def undo(self, inputs: Tensor) -> PreviousUndo:
        """Record the last input, and those that follow."""
        return PreviousUndo(self.previous.clone(), inputs)


@dataclasses.dataclass
class PreviousUndo(Undo):
    """The last input before the tokens, and the inputs of the tokens."""

    previous: Tensor  # [S,C]
    inputs: Tensor  # [S,T,C]

    over_time = ("inputs",)

    def restore_(self, state: PreviousToken) -> None:
        """Put the last input back."""
        state.previous = self.previous


class TokenShift(nn.Module):
    """y_t = W x_t + V x_{t-1}.

    Recall begins with knowing which token came before. Attention learns to look there; this layer is given it, which
    lets very small models learn recall in minutes. It is not part of the paper's models.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        check_size(hidden_size=hidden_size)
        self.hidden_size = hidden_size
        self.current_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.previous_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        state: PreviousToken | None = None,
        return_state: bool = False,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, PreviousToken]:
        """Mix a stretch of tokens, as every `sdm.layers.interface.SequenceLayer` does."""
        check_input(x, self.hidden_size)
        streams = streams_of(x, attention_mask, cu_seqlens)
        if state is not None:
            check_state(state, PreviousToken, streams.count, x.device, previous=(self.hidden_size,))
        aligned = streams.align(x)
        shifted, previous = shift(aligned, None if state is None else state.previous, streams)
        y = streams.restore(self.current_proj(aligned) + self.previous_proj(shifted))
        return (y, PreviousToken(previous)) if return_state else y

    @torch.no_grad()
    def extend_(
        self, x: Tensor, state: PreviousToken, attention_mask: Tensor | None = None, record: Record | None = None
    ) -> Tensor:
        """Mix a stretch of tokens in place, as every `sdm.layers.interface.SequenceLayer` does."""
        if record is not None:
            record(state.undo(x))
        y, after = self(x, state, return_state=True, attention_mask=attention_mask)
        state.assign_(after)
        return y

    @torch.no_grad()
    def replay_(self, state: PreviousToken, undo: PreviousUndo) -> None:
        """Make the last input of an undo record the previous one."""
        state.previous = undo.inputs[:, -1].to(state.previous.dtype, copy=True)

    @torch.no_grad()
    def step_(self, x: Tensor, state: PreviousToken, record: Record | None = None) -> Tensor:
        """Decode one token: x [B,hidden_size] gives y of the same shape; `state` changes in place."""
        check_input(x, self.hidden_size, "[B,hidden_size]")
        check_state(state, PreviousToken, x.shape[0], x.device, previous=(self.hidden_size,))
        if record is not None:
            record(state.undo(x.unsqueeze(1)))
        y = self.current_proj(x) + self.previous_proj(state.previous.to(x.dtype))
        state.previous.copy_(x)
        return y

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay."""
        return without_weight_decay(self)

    def start_state(self, batch_size: int, learn: bool = False) -> PreviousToken:
        """The state of streams without tokens, as every `sdm.layers.interface.SequenceLayer` has it."""
        return PreviousToken(self.current_proj.weight.new_zeros(batch_size, self.hidden_size))


def shift(x: Tensor, previous: Tensor | None, streams: Streams) -> tuple[Tensor, Tensor]:
    """x [B,T,C] in left-aligned rows or packed, one token later, and the last token of each stream [S,C]."""
    time = x.shape[1]
    if previous is None:
        previous = x.new_zeros(streams.count, x.shape[2])
    previous = previous.to(x.dtype)
    if streams.bounds is None:
        stream = torch.cat((previous.unsqueeze(1), x), dim=1)
        if streams.lengths is None:
            return stream[:, :time], stream[:, time]
        last = streams.lengths.view(-1, 1, 1).expand(-1, 1, x.shape[2])
        return stream[:, :time], stream.gather(1, last).squeeze(1)
    if time == 0:
        return x, previous
    starts, ends = streams.bounds[:-1], streams.bounds[1:]
    document = documents_of(streams.bounds, time).clamp(max=streams.count - 1)
    begins = torch.arange(time, device=x.device) == starts[document]
    shifted = torch.cat((x.new_zeros(1, x.shape[2]), x[0]))[:time]
    shifted = torch.where(begins.unsqueeze(-1), previous[document], shifted)
    last = torch.where((ends > starts).unsqueeze(-1), x[0, (ends - 1).clamp(0, time - 1)], previous)
    return shifted.unsqueeze(0), last
