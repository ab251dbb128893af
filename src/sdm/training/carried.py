"""The states that streams carry from step to step: one set per accumulated piece of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm.layers.state import LayerState, current_names
from sdm.models import SDMForCausalLM
from sdm.models.likelihood import States


class CarriedStates:
    """Kept between steps, cut off from their gradients, and part of a checkpoint."""

    def __init__(self, pieces: int) -> None:
        self._states: list[States | None] = [None] * pieces

    def begin(self, model: SDMForCausalLM, piece: int, reset: Tensor) -> States | None:
        return begin_streams(model, self._states[piece], reset)

    def keep(self, piece: int, states: States) -> None:
        self._states[piece] = [state.map(Tensor.detach) for state in states]

    def tensors(self) -> dict[str, Tensor]:
        """By `piece.layer.name`."""
        return {
            f"{piece}.{layer}.{name}": x
            for piece, states in enumerate(self._states)
            for layer, state in enumerate(states or ())
            for name, x in state.tensors().items()
            if x.numel()
        }

    def description(self) -> list[Any]:
        """What it takes to make room for the tensors again: per piece and layer, shapes and dtypes by name."""

        def describe(state: LayerState) -> dict[str, Any]:
            return {name: [list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in state.tensors().items()}

        return [None if states is None else [describe(state) for state in states] for states in self._states]

    def prepare(self, model: SDMForCausalLM, description: list[Any], device: torch.device) -> dict[str, str]:
        """States of the described shapes, for a checkpoint to fill. Returns by what name the checkpoint has those
        tensors that are called otherwise today."""
        mixers = [block.mixer for block in model.model.layers]
        older: dict[str, str] = {}
        self._states = [None] * len(description)
        for piece, layers in enumerate(description):
            if layers is None:
                continue
            self._states[piece] = states = []
            for place, (mixer, layer) in enumerate(zip(mixers, layers, strict=True)):
                example = mixer.start_state(0)
                written = current_names({name: name for name in layer}, example)
                older |= {f"{piece}.{place}.{name}": f"{piece}.{place}.{written[name]}" for name in written}
                parts = {}
                for name, old in written.items():
                    shape, dtype = layer[old]
                    parts[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
                states.append(example.with_tensors(parts))
        return {name: old for name, old in older.items() if name != old}


def begin_streams(model: SDMForCausalLM, states: States | None, reset: Tensor) -> States | None:
    """The states to start a step from: carried on, cut off from the gradients of the step before, except where `reset`
    [B] says that a row begins anew. A learned initial state gets its gradient from the rows that begin."""
    if states is None or bool(reset.all()):
        return None
    carried = [state.map(Tensor.detach) for state in states]
    if not bool(reset.any()):
        return carried
    return [
        state.restarted(reset, block.mixer.start_state(len(reset), learn=True))
        for block, state in zip(model.model.layers, carried, strict=True)
    ]
