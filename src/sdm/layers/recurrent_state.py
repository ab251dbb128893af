"""The state of Gated DeltaNet and Mamba2, and what memories start from.

Shapes: S streams (batch rows or documents), H heads, K key channels, D value channels.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from sdm.layers.state import LayerState


@dataclasses.dataclass
class RecurrentState(LayerState):
    """The state of a recurrent layer with a short convolution in front."""

    memory: Tensor  # [S,H,K,D], at least float32
    tail: Tensor  # [S, taps - 1, channels] the last inputs of the convolution; no places without one


def start_memory(initial_state: nn.Parameter | None, shape: tuple[int, ...], like: Tensor, learn: bool) -> Tensor:
    """The memories [S,...] of streams without tokens: the learned initial state, or zeros. See `start_state`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if initial_state is None:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    memory = initial_state.to(dtype).expand(shape)
    return memory if learn else memory.detach().clone()
