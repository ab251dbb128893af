"""The state of Gated DeltaNet and Mamba2, and what memories start from.

Shapes: S streams (batch rows or documents), H heads, K key channels, D value channels.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from sdm.layers.state import LayerState, Undo


@dataclasses.dataclass
class RecurrentState(LayerState):
    """The state of a recurrent layer with a short convolution in front."""

    memory: Tensor  # [S,H,K,D], at least float32
    tail: Tensor  # [S, taps - 1, channels] the last inputs of the convolution; no places without one

    def _undo_type(self) -> type[Undo]:
        return RecurrentUndo

    def undo(self, projected: Tensor, beta: Tensor, log_decay: Tensor) -> RecurrentUndo:
        """Record the memory and the tail as they are, and the inputs of the convolution and of the rule."""
        return RecurrentUndo(self.memory.clone(), self.tail.clone(), projected, beta, log_decay)


@dataclasses.dataclass
class RecurrentUndo(Undo):
    """A copy of the state before the tokens, and what it takes to run them again without their projections."""

    memory: Tensor  # [S,H,K,D]
    tail: Tensor  # [S, taps - 1, channels]
    projected: Tensor  # [S,T,channels] queries, keys and values before the convolution
    beta: Tensor  # [S,T,H]
    log_decay: Tensor  # [S,T,H]

    over_time = ("projected", "beta", "log_decay")

    def restore_(self, state: RecurrentState) -> None:
        """Set the state to the copy."""
        state.memory, state.tail = self.memory, self.tail


def start_memory(initial_state: nn.Parameter | None, shape: tuple[int, ...], like: Tensor, learn: bool) -> Tensor:
    """The memories [S,...] of streams without tokens: the learned initial state, or zeros. See `start_state`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if initial_state is None:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    memory = initial_state.to(dtype).expand(shape)
    return memory if learn else memory.detach().clone()
