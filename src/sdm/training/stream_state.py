"""The recurrent states that streams carry from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from sdm.models.causal_lm import carried_layers
from sdm.models.likelihood import States
from sdm.training.parallel import Parallel

LAYERS = "layers"  # shapes and dtypes of the states' tensors, by layer and name


class StreamState(Stateful):
    """The states between two steps, detached, one set per accumulated piece of the batch.

    A checkpoint holds the rows of all pieces and ranks as one tensor, in the order of the batch, so that a run can be
    continued with another number of either.

    Args:
        model: the full model, before it is sharded: its layers define the states' types.
        pieces: the rows of each of this rank's pieces.
        batch_size: rows over all ranks.
        parallel: the ranks of the run.
    """

    def __init__(self, model: nn.Module, pieces: Sequence[range], batch_size: int, parallel: Parallel) -> None:
        self._kinds = [layer.start_state(0) for layer in carried_layers(model)]
        self._device, self._parallel, self._batch_size = parallel.device, parallel, batch_size
        self._pieces = pieces
        self._states: list[States | None] = [None] * len(pieces)

    def fresh(self, pieces: Sequence[range]) -> StreamState:
        """Return an empty copy for other pieces of such batches."""
        new = object.__new__(StreamState)
        new.__dict__ = self.__dict__ | {"_pieces": pieces, "_states": [None] * len(pieces)}
        return new

    def begin(self, piece: int, reset: Tensor, any_reset: bool) -> tuple[States | None, Tensor | None]:
        """Return the states that a step starts from, and the rows in which a new stream starts instead.

        Args:
            piece: the index of the piece.
            reset: [rows of the piece], whether a new stream starts in a row.
            any_reset: whether one does in any row of any rank. Then all ranks take the path with resets, although it
                may change nothing for this one: the gradient of a learned initial state is reduced over all of them.

        Returns:
            The states, None if all rows start anew; and the resets, None if no row does.
        """
        states = self._states[piece]
        if states is None:
            return None, None
        if not self._pieces[piece]:  # the placeholder row of a rank without rows follows the others
            reset = torch.full_like(reset, any_reset)
        if bool(reset.all()):
            return None, None
        follows = any_reset and self._parallel.ranks.size > 1
        return states, reset if follows or bool(reset.any()) else None

    def keep(self, piece: int, states: States) -> None:
        """Store the states of a piece for the next step."""
        self._states[piece] = [state.map(Tensor.detach) for state in states]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all rows by "layer.name", and their shapes and dtypes by layer; None without states."""
        kept = [states for states in self._states if states is not None]  # of all pieces, or of none
        if not kept:
            return {LAYERS: None}

        def describe(x: Tensor) -> list[Any]:
            return [[self._batch_size, *x.shape[1:]], str(x.dtype).removeprefix("torch.")]

        tensors = {}
        for layer in range(len(self._kinds)):
            parts = [states[layer].tensors() for states in kept]
            for name in parts[0]:
                rows = [part[name][: len(piece)] for part, piece in zip(parts, self._pieces, strict=True)]
                own = rows[0] if len(rows) == 1 else torch.cat(rows)
                if own[:1].numel():
                    tensors[f"{layer}.{name}"] = self._parallel.rows_of_all(own, self._batch_size)
        return {LAYERS: [{name: describe(x) for name, x in state.tensors().items()} for state in kept[0]], **tensors}

    def empty_tensors(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """Allocate the rows of this rank for a checkpoint with these shapes and dtypes."""
        tensors = {}
        for layer, described in enumerate(values[LAYERS] or ()):
            for name, (shape, dtype) in described.items():
                x = torch.zeros([len(self._rows()), *shape[1:]], dtype=getattr(torch, dtype), device=self._device)
                if x.numel():
                    tensors[f"{layer}.{name}"] = self._parallel.rows_of_all(x, self._batch_size)
        return tensors

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the states of a checkpoint."""
        self._states = [None] * len(self._pieces)
        if state_dict[LAYERS] is None:
            return
        for place, rows in enumerate(self._pieces):
            states = []
            for layer, (kind, described) in enumerate(zip(self._kinds, state_dict[LAYERS], strict=True)):
                tensors = {
                    name: self._piece(rows, state_dict.get(f"{layer}.{name}"), shape, getattr(torch, dtype))
                    for name, (shape, dtype) in described.items()
                }
                states.append(kind.with_tensors(tensors))
            self._states[place] = states

    def _piece(self, rows: range, x: Tensor | None, shape: list[int], dtype: torch.dtype) -> Tensor:
        """The rows of a piece. Tensors without elements are not in a checkpoint."""
        if x is None or not rows:
            return torch.zeros([len(rows) or 1, *shape[1:]], dtype=dtype, device=self._device)
        first = self._rows().start
        return self._parallel.own_rows(x)[rows.start - first : rows.stop - first].clone()

    def _rows(self) -> range:
        """The rows of this rank."""
        return range(self._pieces[0].start, self._pieces[0].start + sum(map(len, self._pieces)))
