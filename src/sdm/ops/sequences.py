"""What the rules over a sequence of tokens have in common: their calls, packed documents, and decays within a chunk.

Shapes: B batch, T time, H heads, N rows of the state, D value channels, S sequences (batch rows or documents), C tokens
of a chunk, K channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sdm.ops import backends
from sdm.ops.checks import compute_dtype, document_bounds, has_values

BLOCK = 16  # tokens whose decays per channel are written out, pair by pair


class SequenceTokens(Protocol):
    """What an op's `Tokens`, a named tuple of tensors, have in common."""

    @property
    def value(self) -> Tensor:
        """[B,T,H,D], or [B,H,D] for a single step."""

    def to(self, dtype: torch.dtype) -> Self:
        """Convert the floats to this dtype."""

    def __iter__(self) -> Iterator[Tensor]: ...


TokensT = TypeVar("TokensT", bound=SequenceTokens)


@dataclass(eq=False)
class Call(backends.Call, Generic[TokensT]):
    """A checked call of a rule over a sequence of tokens.

    `run` serves it by the output [B,T,H,D] and the final state [S,H,N,D], which may be anything if nobody asks for it;
    `step_` by the output [B,H,D] and `run_` by the output [B,T,H,D].
    """

    tokens: TokensT  # the op's Tokens
    state: Tensor | None  # the initial one, [H,N,D] or [S,H,N,D]; or that which changes in place, [B,H,N,D]
    rows: int
    cu_seqlens: Tensor | None = None
    output_final_state: bool = True
    update: str = "delta"  # of the sparse delta rule
    in_place: bool = False

    def __post_init__(self) -> None:
        value = self.tokens.value
        self.device, self.single_step = value.device, value.dim() == 3
        self.dtype = compute_dtype(*self.tokens, self.state)

    def in_full(self) -> tuple[TokensT, Tensor]:
        """Floats in the dtype of the arithmetic, the initial state as [S,H,N,D]."""
        tokens, state = self.tokens.to(self.dtype), self.state
        if state is None:
            state = torch.zeros((), device=self.device)
        if state.dim() < 4:
            batch, _, heads, channels = tokens.value.shape
            sequences = batch if self.cu_seqlens is None else self.cu_seqlens.numel() - 1
            state = state.expand(sequences, heads, self.rows, channels)
        return tokens, state.to(self.dtype)


def serve_rule(op: str, backend: str, call: Call) -> tuple[Tensor, Tensor | None]:
    """Over a sequence; the output is in the dtype of the values."""
    y, final_state = backends.serve(op, backend, call)
    return y.to(call.tokens.value.dtype), final_state if call.output_final_state else None


def run_documents(
    run: Callable[[TokensT, Tensor], tuple[Tensor, Tensor]], tokens: TokensT, state: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run a rule for rows of equal length over the batch or, one after the other, over the documents packed in it."""
    if cu_seqlens is None:
        return run(tokens, state)
    make: Callable[..., TokensT] = type(tokens)
    documents = [
        run(make(*(x[:, start:end] for x in tokens)), state[s : s + 1])
        for s, (start, end) in enumerate(itertools.pairwise(document_bounds(cu_seqlens, tokens.value.shape[1])))
    ]
    outputs, states = zip(*documents, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(states)


class PackedChunks(NamedTuple):
    """Packed documents laid out into chunks on their device, so that nothing waits for it.

    Shapes: T time, S documents, G chunks: as many as S documents can take at most.
    """

    place: Tensor
    """[G*C] where each place of each chunk finds its token; T: padding."""
    slot: Tensor
    """[T] where each token went."""
    chunks: Tensor
    """[S+1] the chunks at which documents begin."""

    @staticmethod
    def of(cu_seqlens: Tensor, time: int, chunk: int, device: torch.device) -> PackedChunks:
        """Lay out documents. Offsets are checked on a CPU; elsewhere nobody looks at them."""
        if cu_seqlens.is_cpu and has_values(cu_seqlens):
            document_bounds(cu_seqlens, time)
        return PackedChunks.of_any_bounds(cu_seqlens, time, chunk, device)

    @staticmethod
    def of_any_bounds(cu_seqlens: Tensor, time: int, chunk: int, device: torch.device) -> PackedChunks:
        """The same for offsets that may make no sense. In ascending order and within the row they lead nowhere else."""
        count = cu_seqlens.numel() - 1
        bounds = cu_seqlens.to(device, torch.int64).clamp(0, time).cummax(0).values
        chunks = torch.cat((bounds.new_zeros(1), ((bounds.diff() + chunk - 1) // chunk).cumsum(0)))
        group = torch.arange(time // chunk + count, device=device)
        document = torch.bucketize(group, chunks[1:], right=True)
        known = document.clamp(max=count - 1)
        start = bounds[known] + (group - chunks[known]) * chunk
        place = start.unsqueeze(-1) + torch.arange(chunk, device=device)
        used = (document < count).unsqueeze(-1) & (place < bounds[known + 1].unsqueeze(-1))
        token = torch.arange(time, device=device)
        of = torch.bucketize(token, bounds[1:], right=True).clamp(max=count - 1)
        slot = (chunks[of] * chunk + token - bounds[of]).clamp(0, len(group) * chunk - 1)
        return PackedChunks(torch.where(used, place, time).flatten(), slot, chunks)

    def pad(self, tokens: TokensT) -> TokensT:
        """Tokens [1,T,...] in chunks [1,G*C,...]. A row of zeros at the end serves every padding place."""
        make: Callable[..., TokensT] = type(tokens)
        return make(*(torch.cat((x, x.new_zeros(1, 1, *x.shape[2:])), dim=1)[:, self.place] for x in tokens))


def carry_states(decay: Tensor, added: Tensor, initial: Tensor, chunks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run state <- decay * state + added over chunks.

    Args:
        decay: [B,H,G,...], added: [B,H,G,N,D].
        initial: states [S,H,N,D] of the batch rows, or of the documents packed in one row.
        chunks: `PackedChunks.chunks`, the chunks at which documents begin.

    Returns:
        The state before each chunk [B,H,G,N,D], and the final states [S,H,N,D].
    """
    state, befores, afters = initial, [], [initial]
    if chunks is not None:
        group = torch.arange(added.shape[2], device=added.device)
        document = torch.bucketize(group, chunks[1:], right=True).clamp(max=len(initial) - 1)
        begins = (group == chunks[document]).view(-1, 1, 1, 1, 1)
        firsts, state = initial[document].unsqueeze(1), initial[:1]
    for place, (factor, addition) in enumerate(zip(decay.unbind(2), added.unbind(2), strict=True)):
        if chunks is not None:
            state = torch.where(begins[place], firsts[place], state)
        befores.append(state)
        state = factor * state + addition
        afters.append(state)
    before = torch.stack(befores, dim=2)
    if chunks is None:
        return before, state
    # A document without tokens has no chunk, and ends as it began.
    last = torch.cat(afters[1:])[(chunks[1:] - 1).clamp(min=0)]
    return before, torch.where((chunks.diff() > 0).view(-1, 1, 1, 1), last, initial)


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
