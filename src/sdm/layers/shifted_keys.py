"""Keys from the tokens before: what is written under a token is what came after it.

Shapes: B batch, T time, S streams (batch rows or documents), C channels, K taps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sdm.layers.determinism import is_deterministic, token_by_token
from sdm.layers.interface import Streams, check_input, streams_of, without_weight_decay
from sdm.layers.modules import ShortConvolution
from sdm.layers.recurrent_layer import RecurrentLayer
from sdm.layers.sparse_delta_memory import SparseDeltaMemory
from sdm.layers.state import LayerState, Record, Undo, check_state
from sdm.layers.token_shift import shift


@dataclasses.dataclass
class ShiftedState(LayerState):
    """The state of the layer within, and the last token, or the last tokens that a convolution needs."""

    inner: LayerState
    previous: Tensor  # [S,C], or [S,K-1,C]

    def undo_of(self, tensors: Mapping[str, Tensor]) -> Undo:
        """Return the undo record that has these tensors, with that of the layer within."""
        inner = {name.removeprefix("inner."): x for name, x in tensors.items() if name.startswith("inner.")}
        own = {name: x for name, x in tensors.items() if not name.startswith("inner.")}
        return ShiftedUndo(inner=self.inner.undo_of(inner), **own) if inner else super().undo_of(tensors)


@dataclasses.dataclass
class ShiftedUndo(Undo):
    """The record of the layer within, the last tokens before, and the inputs of the tokens."""

    inner: Undo
    previous: Tensor  # [S,C], or [S,K-1,C]
    inputs: Tensor  # [S,T,C]

    over_time = ("inputs",)

    def restore_(self, state: ShiftedState) -> None:
        """Restore the state within and the last tokens."""
        self.inner.restore_(state.inner)
        state.previous = self.previous


class KeyConvolution(ShortConvolution):
    """A causal convolution that starts as the token before, and may become anything else."""

    activation = False

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__(channels, kernel_size, shifted=slice(None))


class ShiftedKeys(nn.Module):
    """A memory whose keys come from the previous token's input, its values and queries from the current one's.

    Asking for a token then finds what followed it earlier, from the first step of training on if W_q starts equal to
    W_k. Large models find this by themselves through their local layers; it is not part of the paper's models.

    With `taps`, the keys come from a convolution over so many tokens that only starts as this shift: an initialisation,
    which training may leave, instead of a rule.
    """

    def __init__(self, layer: SparseDeltaMemory | RecurrentLayer, taps: int = 0) -> None:
        super().__init__()
        if taps and taps < 2:
            raise ValueError(f"taps must be 0 or at least 2, to see the token before, got {taps}")
        self.layer = layer
        self.hidden_size = layer.hidden_size
        self.conv = KeyConvolution(self.hidden_size, taps) if taps else None
        self.history = max(1, taps - 1)  # tokens before the current one that a key may come from

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
            check_state(state, ShiftedState, streams.count, x.device, previous=self._previous_shape())
        shifted, previous = self.key_input(streams.align(x), None if state is None else state.previous, streams)
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
    def step_(self, x: Tensor, state: ShiftedState, record: Record | None = None) -> Tensor:
        """Decode one token: x [B,hidden_size] gives y of the same shape; `state` changes in place."""
        check_input(x, self.hidden_size, "[B,hidden_size]")
        check_state(state, ShiftedState, x.shape[0], x.device, previous=self._previous_shape())
        inner = _with_inputs(record, state.previous, x.unsqueeze(1))
        if self.conv is not None:
            return self.layer.step_(x, state.inner, inner, key_input=self.conv.step_(x, state.previous))  # type: ignore[arg-type]
        y = self.layer.step_(x, state.inner, inner, key_input=state.previous.to(x.dtype))  # type: ignore[arg-type]
        state.previous.copy_(x)
        return y

    @torch.no_grad()
    def extend_(
        self, x: Tensor, state: ShiftedState, attention_mask: Tensor | None = None, record: Record | None = None
    ) -> Tensor:
        """Mix a stretch of tokens in place, as every `sdm.layers.interface.SequenceLayer` does."""
        check_input(x, self.hidden_size)
        streams = streams_of(x, attention_mask, None)
        check_state(state, ShiftedState, streams.count, x.device, previous=self._previous_shape())
        inner = _with_inputs(record, state.previous, x)
        if self.conv is not None and is_deterministic():
            conv, previous = self.conv, state.previous.clone()
            shifted = token_by_token(lambda t: conv.step_(x[:, t], previous), x.shape[1], x)
        else:
            shifted, previous = self.key_input(streams.align(x), state.previous, streams)
        y = self.layer.extend_(x, state.inner, attention_mask, inner, key_input=streams.restore(shifted))  # type: ignore[arg-type]
        state.previous = previous
        return y

    @torch.no_grad()
    def replay_(self, state: ShiftedState, undo: ShiftedUndo) -> None:
        """Put the tokens of an undo record back into the state within, and the last of them here."""
        self.layer.replay_(state.inner, undo.inner)  # type: ignore[arg-type]
        if self.conv is None:
            state.previous = undo.inputs[:, -1].to(state.previous.dtype, copy=True)
        else:
            stream = torch.cat((state.previous, undo.inputs.to(state.previous.dtype)), dim=1)
            state.previous = stream[:, -self.history :].clone()

    def key_input(self, x: Tensor, previous: Tensor | None, streams: Streams) -> tuple[Tensor, Tensor]:
        """What the keys of x [B,T,C] in left-aligned rows or packed come from, and `previous` after the last token."""
        return shift(x, previous, streams) if self.conv is None else self.conv(x, previous, streams)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay, with those of the layer within."""
        return without_weight_decay(self)

    def start_state(self, batch_size: int, learn: bool = False) -> ShiftedState:
        """The state of streams without tokens, as every `sdm.layers.interface.SequenceLayer` has it."""
        previous = self.layer.key_proj.weight.new_zeros(batch_size, *self._previous_shape())
        return ShiftedState(self.layer.start_state(batch_size, learn), previous)

    def _previous_shape(self) -> tuple[int, ...]:
        """Of a stream."""
        return (self.hidden_size,) if self.conv is None else (self.history, self.hidden_size)

    def sparse_tables(self) -> dict[str, SparseDeltaMemory]:
        """As `SparseDeltaMemory.sparse_tables`."""
        if isinstance(self.layer, SparseDeltaMemory):
            return {f"inner.{name}": layer for name, layer in self.layer.sparse_tables().items()}
        return {}


def _with_inputs(record: Record | None, previous: Tensor, inputs: Tensor) -> Record | None:
    """What the layer within hands its record to: it is recorded together with the last tokens and the inputs."""
    if record is None:
        return None
    before = previous.clone()
    return lambda inner: record(ShiftedUndo(inner, before, inputs))
