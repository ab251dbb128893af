"""The states that streams carry from step to step: one set per accumulated piece of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm.layers.interface import map_state
from sdm.models import SDMForCausalLM
from sdm.training.loss import States, begin_streams


class CarriedStates:
    """Kept between steps, cut off from their gradients, and part of a checkpoint."""

    def __init__(self, pieces: int) -> None:
        self._states: list[States | None] = [None] * pieces

    def begin(self, model: SDMForCausalLM, piece: int, reset: Tensor) -> States | None:
        return begin_streams(model, self._states[piece], reset)

    def keep(self, piece: int, states: States) -> None:
        self._states[piece] = [map_state(Tensor.detach, state) for state in states]

    def tensors(self) -> dict[str, Tensor]:
        """By `piece.layer.name`."""
        found: dict[str, Tensor] = {}
        for piece, states in enumerate(self._states):
            for layer, state in enumerate(states or ()):
                parts = {"state": state} if isinstance(state, Tensor) else state.tensors()
                found |= {f"{piece}.{layer}.{name}": x for name, x in parts.items()}
        return {name: x for name, x in found.items() if x.numel()}

    def description(self) -> list[Any]:
        """What it takes to make room for the tensors again: per piece and layer, shapes and dtypes by name."""
        return [
            None
            if states is None
            else [
                {
                    name: [list(x.shape), str(x.dtype).removeprefix("torch.")]
                    for name, x in ({"state": state} if isinstance(state, Tensor) else state.tensors()).items()
                }
                for state in states
            ]
            for states in self._states
        ]

    def prepare(self, model: SDMForCausalLM, description: list[Any], device: torch.device) -> None:
        """States of the described shapes, for a checkpoint to fill."""

        def make(mixer: Any, layer: dict[str, Any]) -> Any:
            parts = {
                name: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
                for name, (shape, dtype) in layer.items()
            }
            example = mixer.start_state(1)
            return parts["state"] if isinstance(example, Tensor) else type(example)(**parts)

        mixers = [block.mixer for block in model.model.layers]
        self._states = [
            None if states is None else [make(mixer, layer) for mixer, layer in zip(mixers, states, strict=True)]
            for states in description
        ]
