"""What a map is made from, and the map itself.

Shapes: B batch, T time, H heads, R reads, D value channels, P pairs.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from sdm.ops import backends
from sdm.ops.checks import compute_dtype
from sdm.ops.sparse_delta_rule.inputs import Tokens


@dataclass(eq=False)
class MapCall(backends.Call):
    """A checked call of `sparse_delta_map`, with tokens on the CPU."""

    tokens: Tokens
    num_slots: int
    cu_seqlens: Tensor | None
    update: str
    threshold: float

    def __post_init__(self) -> None:
        self.device, self.dtype = self.tokens.value.device, compute_dtype(*self.tokens)


@dataclass(frozen=True, eq=False)
class ReadMap:
    """A sparse matrix from reading tokens to writing tokens, for every stream [B,H], in CSR form.

    Row `(b * H + h) * T + t` belongs to the token t of head h in batch row b. Its pairs are
    `source[row_offsets[row] : row_offsets[row + 1]]` and the same places of `weight`.
    """

    shape: tuple[int, int, int]
    """B, H, T."""
    row_offsets: Tensor
    """[B*H*T + 1] int64."""
    source: Tensor
    """[P] int32, the writing tokens of each row, ascending."""
    weight: Tensor
    """[P] float64, S[t,l]."""
    initial_weight: Tensor
    """[B,T,H,R] float64, the weight of the initial row of each slot that is read."""
    dropped: Tensor
    """[B,H,T] float64, the sum of |S[t,l]| over the pairs below the threshold."""

    def matrix(self, batch: int = 0, head: int = 0) -> Tensor:
        """S of one stream as a sparse CSR tensor [T,T]."""
        heads, time = self.shape[1:]
        start = (batch * heads + head) * time
        offsets = self.row_offsets[start : start + time + 1]
        pairs = slice(int(offsets[0]), int(offsets[-1]))
        with warnings.catch_warnings():  # torch calls its CSR tensors a beta feature
            warnings.filterwarnings("ignore", "Sparse CSR")
            return torch.sparse_csr_tensor(
                offsets - offsets[0],
                self.source[pairs].long(),
                self.weight[pairs],
                (time, time),
                check_invariants=True,
            )

    def dense(self) -> Tensor:
        """S as a dense tensor [B,H,T,T]."""
        batch, heads, time = self.shape
        dense = torch.zeros(batch * heads * time, time, dtype=self.weight.dtype)
        rows = torch.repeat_interleave(torch.arange(len(dense)), self.row_offsets.diff())
        dense[rows, self.source.long()] = self.weight
        return dense.view(batch, heads, time, time)

    def apply(self, delta: Tensor) -> Tensor:
        """Multiply S by delta [B,T,H,D]: the part [B,T,H,D] of the readings that comes from writes."""
        batch, heads, time = self.shape
        parts = [self.matrix(b, h) @ delta[b, :, h].double() for b in range(batch) for h in range(heads)]
        return torch.stack(parts).unflatten(0, (batch, heads)).transpose(1, 2) if time else delta.double()

    def apply_initial(self, initial_state: Tensor, read_index: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Weigh the initial rows: the part [B,T,H,D] of the readings that comes from the state before the first token.

        Args:
            initial_state: [H,N,D], or [S,H,N,D] with a table for each batch row or document.
            read_index: [B,T,H,R] of the mapped call.
            cu_seqlens: of the mapped call.
        """
        batch, heads, time = self.shape
        tables = initial_state.detach().cpu().double()
        out = tables.new_zeros(batch, time, heads, tables.shape[-1])
        if tables.dim() == 3:
            which = torch.zeros(batch, time, dtype=torch.int64)
            tables = tables.unsqueeze(0)
        elif cu_seqlens is None:
            which = torch.arange(batch).unsqueeze(1).expand(batch, time)
        else:
            lengths = cu_seqlens.cpu().diff()
            which = torch.repeat_interleave(torch.arange(len(lengths)), lengths).unsqueeze(0)
        index, weight = read_index.cpu().long(), self.initial_weight
        for b in range(batch):
            for h in range(heads):
                for start in range(0, time, 256):  # the rows of a few tokens at a time
                    cut = slice(start, start + 256)
                    rows = tables[which[b, cut].unsqueeze(1), h, index[b, cut, h]]
                    out[b, cut, h] = torch.einsum("tr,trd->td", weight[b, cut, h], rows)
        return out


def sparse_map(dense: Tensor, initial_weight: Tensor, threshold: float = 0.0) -> ReadMap:
    """Compress a dense map [B,H,T,T], leaving out pairs below `threshold` of their row's mass."""
    batch, heads, time, _ = dense.shape
    size = dense.abs()
    mass = size.sum(-1, keepdim=True)
    kept = (dense != 0) & ~(size < threshold * mass)
    pairs = kept.flatten(0, 2).sum(-1)
    row_offsets = torch.cat((torch.zeros(1, dtype=torch.int64), pairs.cumsum(0)))
    dropped = size.masked_fill(kept, 0).sum(-1)
    source = kept.flatten(0, 2).nonzero()[:, 1].int()
    return ReadMap((batch, heads, time), row_offsets, source, dense[kept], initial_weight, dropped)
