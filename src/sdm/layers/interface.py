"""What every layer offers, how the tokens of a call are laid out, and the checks that the layers share.

A layer mixes tokens over time and keeps what it remembers in a state that it is given and gives back (`state.py`).

Shapes: B batch, T time, C channels, S streams (batch rows or documents).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from sdm.layers.state import LayerState, Record, Undo
from sdm.ops.checks import check_cu_seqlens, document_bounds

# Matrices that weight decay would harm: an initial state holds content, and gates rest at other values than zero.
_EXEMPT_MATRICES = (
    *("initial_state", "initial_keys", "decay_bias"),
    *("beta_proj.weight", "decay_proj.weight", "decay_down_proj.weight"),
)

_State = TypeVar("_State", bound=LayerState, contravariant=True)
_Undo = TypeVar("_Undo", bound=Undo, contravariant=True)


class SequenceLayer(Protocol[_State, _Undo]):
    """What a model may expect of a layer. The state is the layer's own; a caller only stores it and hands it back."""

    hidden_size: int

    def __call__(
        self,
        x: Tensor,
        state: _State | None = None,
        return_state: bool = False,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """Mix a stretch of tokens: y [B,T,hidden_size], or (y, state) with return_state.

        Differentiable, in the state too, and free of side effects: the given state stays as it is.

        Args:
            x: [B,T,hidden_size].
            state: the state to continue from, one entry per row, or per document with cu_seqlens; None starts anew.
            return_state: also return the state after the last token.
            attention_mask: [B,T], zero or False on padding. Padding leaves the state as it is and gives zeros.
            cu_seqlens: [documents + 1] offsets of documents packed into one row (B = 1). Each is a stream of its own.
        """

    def step_(self, x: Tensor, state: _State, record: Record | None = None) -> Tensor:
        """Decode one token: x [B,hidden_size] gives y of the same shape. The state changes in place; no gradients.

        `record` is given the `Undo` that takes the token back.
        """

    def extend_(
        self, x: Tensor, state: _State, attention_mask: Tensor | None = None, record: Record | None = None
    ) -> Tensor:
        """Mix a stretch of tokens x [B,T,hidden_size] behind `state`, which changes in place; no gradients.

        For prefill in pieces and for verifying drafted tokens: large tables are not copied. `record` is given the
        `Undo` that takes the tokens back.
        """

    def replay_(self, state: _State, undo: _Undo) -> None:
        """Put the tokens of an undo record back into the state that it was made of, without projecting them again."""

    def start_state(self, batch_size: int, learn: bool = False) -> LayerState:
        """The state of streams without tokens, free to be changed in place.

        With `learn` it is what a learned initial state gets its gradient through, and not to be changed.
        """

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay; see `without_weight_decay`."""


def without_weight_decay(module: nn.Module) -> set[str]:
    """Return the names of the parameters that weight decay would harm, of a layer or of a model of such layers.

    Decay pulls towards zero. That is right for matrices, and wrong for what has a meaning at another value: norms
    (one), biases, decay rates, Mamba2's skip, the projections of the gates, and the memory's initial state, which holds
    content rather than weights.
    """
    return {name for name, x in module.named_parameters() if x.dim() < 2 or name.endswith(_EXEMPT_MATRICES)}


def check_input(x: Tensor, hidden_size: int, shape: str = "[B,T,hidden_size]") -> None:
    """`shape` is "[B,hidden_size]" for a single step."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != shape.count(",") + 1 or x.shape[-1] != hidden_size:
        raise ValueError(f"x must be {shape} with hidden_size = {hidden_size}, got shape {list(x.shape)}")


def check_mask(x: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """The mask as booleans [B,T]."""
    if attention_mask is None:
        return None
    if cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens exclude each other: packed documents have no padding")
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a torch.Tensor or None, got {type(attention_mask).__name__}")
    if attention_mask.shape != x.shape[:2]:
        raise ValueError(f"attention_mask must be [B,T] = {list(x.shape[:2])}, got shape {list(attention_mask.shape)}")
    return attention_mask != 0


@dataclasses.dataclass(frozen=True)
class Streams:
    """How the tokens of a call are laid out: rows of valid tokens, left-aligned, or documents packed into one row.

    Layers that look at a token's predecessors work on left-aligned rows: there padding is always behind the tokens
    that could be misled by it, whether it came from the left or from the right.
    """

    count: int  # S
    lengths: Tensor | None = None  # [S] tokens of each stream; None: all have T
    bounds: Tensor | None = None  # [S + 1] offsets of packed documents
    order: Tensor | None = None  # [B,T] where the tokens of a left-aligned row come from
    mask: Tensor | None = None  # [B,T] as the caller gave it

    def align(self, x: Tensor) -> Tensor:
        """[B,T,C] with the valid tokens of each row first, zeros behind them."""
        if self.mask is None or self.order is None:
            return x
        x = x.masked_fill(~self.mask.unsqueeze(-1), 0)
        return x.gather(1, self.order.unsqueeze(-1).expand_as(x))

    def restore(self, y: Tensor) -> Tensor:
        """The inverse of `align`, with zeros on padding."""
        if self.mask is None or self.order is None:
            return y
        y = torch.zeros_like(y).scatter(1, self.order.unsqueeze(-1).expand_as(y), y)
        return y.masked_fill(~self.mask.unsqueeze(-1), 0)

    def valid(self, time: int) -> Tensor | None:
        """[B,T] on the left-aligned rows; None if every token counts."""
        if self.mask is None or self.lengths is None:
            return None
        return torch.arange(time, device=self.mask.device) < self.lengths.unsqueeze(-1)

    def totals(self, time: int, device: torch.device) -> Tensor:
        """[S] tokens of each stream."""
        return self.lengths if self.lengths is not None else torch.full((self.count,), time, device=device)

    def places(self, time: int, device: torch.device) -> Tensor:
        """The place of each token within its stream, [1,T]."""
        place = torch.arange(time, device=device)
        if self.bounds is not None:
            place = place - self.bounds[documents_of(self.bounds, time)]
        return place.unsqueeze(0)


def documents_of(bounds: Tensor, time: int) -> Tensor:
    """The document of each of the packed tokens, [T]."""
    return torch.bucketize(torch.arange(time, device=bounds.device), bounds[1:], right=True)


def streams_of(x: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Streams:
    """Check the mask and the documents of x [B,T,...], and say how its tokens are laid out."""
    mask = check_mask(x, attention_mask, cu_seqlens)
    if mask is not None:
        order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
        return Streams(x.shape[0], mask.sum(1), order=order, mask=mask)
    if cu_seqlens is not None:
        count = check_cu_seqlens(cu_seqlens, x.shape[0], x.device)
        if cu_seqlens.is_cpu:  # reading them would wait for a GPU
            document_bounds(cu_seqlens, x.shape[1])
        bounds = cu_seqlens.to(x.device, torch.int64)
        return Streams(count, bounds.diff(), bounds)
    return Streams(x.shape[0])
