"""What the rules over a sequence of tokens have in common.

Shapes: B batch, T time, H heads, N rows of the state, D value channels, S sequences (batch rows or documents).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from sdm.ops import backends
from sdm.ops.checks import compute_dtype, document_bounds


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
