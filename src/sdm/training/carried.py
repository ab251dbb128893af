"""The states that streams carry from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sdm.layers.state import current_names
from sdm.models import SDMForCausalLM
from sdm.models.likelihood import States
from sdm.training.parallel import Parallel
from sdm.training.parts import Part, Tensors


class CarriedStates(Part):
    """Kept between steps, cut off from their gradients, one set per accumulated piece of the batch.

    A checkpoint holds the rows of all pieces and ranks as one set, in the order of the batch: whoever continues may
    have another number of either. Older versions wrote a set per piece, all of them on one rank.

    Args:
        model: whole, not yet dealt to ranks: its layers say what their states are made of.
        pieces: the rows of each of this rank's pieces.
        batch_size: rows over all ranks.
    """

    def __init__(self, model: SDMForCausalLM, pieces: Sequence[range], batch_size: int, parallel: Parallel) -> None:
        self._kinds = [block.mixer.start_state(0) for block in model.model.layers]
        self._device, self._parallel, self._batch_size = parallel.device, parallel, batch_size
        self._pieces = pieces
        self._states: list[States | None] = [None] * len(pieces)

    def fresh(self, pieces: Sequence[range]) -> CarriedStates:
        """Without any states, for other pieces of such batches."""
        new = object.__new__(CarriedStates)
        new.__dict__ = self.__dict__ | {"_pieces": pieces, "_states": [None] * len(pieces)}
        return new

    def begin(self, piece: int, reset: Tensor, restarts: bool) -> tuple[States | None, Tensor | None]:
        """The states that a step starts from, and in which rows streams begin anew instead. None: in all, or in none.

        Args:
            reset: [rows of the piece], whether a row begins.
            restarts: whether any row does, of those of all ranks. Then all go the same way, though for this one it may
                change nothing: they add up the gradient of a learned initial state.
        """
        states = self._states[piece]
        if states is None:
            return None, None
        if not self._pieces[piece]:  # a row that means nothing goes with the others
            reset = torch.full_like(reset, restarts)
        if bool(reset.all()):
            return None, None
        follows = restarts and self._parallel.ranks.size > 1
        return states, reset if follows or bool(reset.any()) else None

    def keep(self, piece: int, states: States) -> None:
        self._states[piece] = [state.map(Tensor.detach) for state in states]

    def tensors(self) -> Tensors:
        """By `0.layer.name`, the set of all rows."""
        own = {}
        for layer in range(len(self._kinds) if self._kept() else 0):
            parts = [states[layer].tensors() for states in self._kept()]
            for name in parts[0]:
                rows = [part[name][: len(piece)] for part, piece in zip(parts, self._pieces, strict=True)]
                own[f"0.{layer}.{name}"] = rows[0] if len(rows) == 1 else torch.cat(rows)
        return {name: self._parallel.rows_of_all(x, self._batch_size) for name, x in own.items() if x[:1].numel()}

    def note(self) -> Any:
        """What it takes to make room again: per layer, shapes and dtypes by name; [None] without states."""

        def describe(x: Tensor) -> list[Any]:
            return [[self._batch_size, *x.shape[1:]], str(x.dtype).removeprefix("torch.")]

        kept = self._kept()
        return [[{name: describe(x) for name, x in state.tensors().items()} for state in kept[0]] if kept else None]

    def room(self, note: Any) -> Tensors:
        rooms = {}
        for place, layers in enumerate(note):
            for layer, described in enumerate(layers or ()):
                for name, (shape, dtype) in described.items():
                    rows = shape[0] if len(note) > 1 else len(self._rows())
                    x = torch.zeros([rows, *shape[1:]], dtype=getattr(torch, dtype), device=self._device)
                    if len(note) == 1:
                        x = self._parallel.rows_of_all(x, self._batch_size)
                    rooms[f"{place}.{layer}.{name}"] = x
        return {name: x for name, x in rooms.items() if x.numel()}

    def take(self, note: Any, tensors: Tensors) -> None:
        self._states = [None] * len(self._pieces)
        if note[0] is None:
            return
        for place, rows in enumerate(self._pieces):
            states = []
            for layer, (kind, described) in enumerate(zip(self._kinds, note[0], strict=True)):
                names = current_names({name: name for name in described}, kind)
                parts = {}
                for name, written in names.items():
                    found = [tensors.get(f"{set_}.{layer}.{written}") for set_ in range(len(note))]
                    shape, dtype = described[written]
                    parts[name] = self._of_rows(rows, found, shape, getattr(torch, dtype))
                states.append(kind.with_tensors(parts))
            self._states[place] = states

    def _of_rows(self, rows: range, found: list[Tensor | None], shape: list[int], dtype: torch.dtype) -> Tensor:
        """These rows of one tensor of a checkpoint, which has none of those without elements."""
        known = [x for x in found if x is not None]
        if not known or not rows:
            return torch.zeros([len(rows) or 1, *shape[1:]], dtype=dtype, device=self._device)
        if len(found) > 1:
            return torch.cat(known)[rows.start : rows.stop].clone()
        first = self._rows().start
        return self._parallel.own_rows(known[0])[rows.start - first : rows.stop - first].clone()

    def _kept(self) -> list[States]:
        """Those of all pieces, or of none."""
        return [states for states in self._states if states is not None]

    def _rows(self) -> range:
        """Those of this rank."""
        return range(self._pieces[0].start, self._pieces[0].start + sum(map(len, self._pieces)))
