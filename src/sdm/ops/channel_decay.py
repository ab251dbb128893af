"""Decays within a chunk of tokens: sums of log decays between two tokens, and products weighted by them.

Shapes: C tokens of a chunk, K channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16


def segment_sums(log_decay: Tensor) -> Tensor:
    """[..., C] -> [..., C, C] with the sum over s < j <= t at [t,s]; -inf above the diagonal.

    Each entry is a sum of its own terms. The difference of two running sums would be cheaper, but loses the small
    decays of a chunk that also holds a large one; and an entry above the diagonal would be positive.
    """
    size = log_decay.shape[-1]
    keep = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    terms = log_decay.unsqueeze(-1).expand(*log_decay.shape, size).masked_fill(~keep, 0)
    above = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).triu(1)
    return terms.cumsum(-2).masked_fill(above, -torch.inf)


class ChannelDecay:
    """Decays of a chunk, a decay for each channel: exp(L[t,s,i]), L the sum of log_decay[j,i] over s < j <= t.

    The tensor of all pairs and channels would be large. Two tokens of different blocks meet at the first token of the
    later block: L splits into two parts of which none is positive, so that neither factor overflows, and what is left
    is a product of matrices. Pairs within a block are written out. Every L is a sum of its own terms, as in
    `segment_sums`.

    Args:
        log_decay: [..., C, K], at most 0.
        block: tokens of a block.
    """

    def __init__(self, log_decay: Tensor, block: int = BLOCK) -> None:
        self.since_start = log_decay.cumsum(-2).exp()
        """[..., C, K] decay from before the chunk to a token, its own included."""
        self.to_end = _after(log_decay).exp()
        """[..., C, K] decay from a token to the end of the chunk, its own not included."""
        self.time, self.block = log_decay.shape[-2], min(block, max(1, log_decay.shape[-2]))
        blocks = _blocks(log_decay, self.block)
        self._within = segment_sums(blocks.transpose(-1, -2)).exp()  # [..., blocks, K, block, block]
        self._from_anchor = blocks.cumsum(-2).exp()
        self._to_anchor = [_after(log_decay[..., :start, :]).exp() for start in self._starts()]

    def _starts(self) -> range:
        """Where the blocks behind the first one start."""
        return range(self.block, self.time, self.block)

    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        """[..., C, C] with sum_i left[t,i] right[s,i] exp(L[t,s,i]) at [t,s] for s <= t, and zero above."""
        ours, theirs = _blocks(left, self.block), _blocks(right, self.block)
        inner = torch.einsum("...ti,...si,...its->...ts", ours, theirs, self._within)
        anchored = ours * self._from_anchor
        rows = [F.pad(inner[..., 0, :, :], (0, self.time - self.block))]
        for number, (start, decay) in enumerate(zip(self._starts(), self._to_anchor, strict=True), 1):
            size = min(self.block, self.time - start)
            earlier = anchored[..., number, :size, :] @ (right[..., :start, :] * decay).transpose(-1, -2)
            row = torch.cat((earlier, inner[..., number, :size, :size]), dim=-1)
            rows.append(F.pad(row, (0, self.time - row.shape[-1])))
        return torch.cat(rows, dim=-2)

    def sums(self, pairs: Tensor, right: Tensor) -> Tensor:
        """[..., C, K] with sum_{s <= t} pairs[t,s] right[s,i] exp(L[t,s,i]) at [t,i], from pairs [..., C, C]."""
        theirs = _blocks(right, self.block)
        rows = []
        for number, start in enumerate((0, *self._starts())):
            size = min(self.block, self.time - start)
            within = self._within[..., number, :, :size, :size]
            own = pairs[..., start : start + size, start : start + size]
            row = torch.einsum("...ts,...si,...its->...ti", own, theirs[..., number, :size, :], within)
            if number:
                decayed = right[..., :start, :] * self._to_anchor[number - 1]
                earlier = pairs[..., start : start + size, :start] @ decayed
                row = row + earlier * self._from_anchor[..., number, :size, :]
            rows.append(row)
        return torch.cat(rows, dim=-2)


def _after(log_decay: Tensor) -> Tensor:
    """[..., C, K] with the sum over the tokens behind each token."""
    return F.pad(log_decay[..., 1:, :], (0, 0, 0, min(1, log_decay.shape[-2]))).flip(-2).cumsum(-2).flip(-2)


def _blocks(x: Tensor, block: int) -> Tensor:
    """[..., C, K] -> [..., blocks, block, K], the last block filled up with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % block)).unflatten(-2, (-1, block))
