"""How the tokens of a call are laid out: rows, padded rows or packed documents.

Shapes: B batch, T time, C channels, S streams (batch rows or documents).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sdm.layers.interface import check_mask
from sdm.ops.checks import check_cu_seqlens, document_bounds


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
