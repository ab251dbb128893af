"""The state of a trainer: everything that the next step depends on, as torch `Stateful` objects.

A `state_dict` holds tensors and JSON values side by side. A checkpoint stores the tensors of all parts together, under
"part.name", and the values in its state.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from sdm.data.batch import Batches, BatchSource
from sdm.models.causal_lm import carried_layers
from sdm.models.likelihood import States
from sdm.run.checkpoint import CheckpointStore
from sdm.run.export import model_tensors
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


Tensors = dict[str, Tensor]


@runtime_checkable
class Allocating(Protocol):
    """A part whose tensors have to be allocated before a checkpoint is read: the trainer starts without them."""

    def empty_tensors(self, values: Mapping[str, Any]) -> Tensors:
        """Return tensors to read into, by name, for a checkpoint with these JSON values."""
        ...


def split_state(parts: Mapping[str, Stateful]) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """Return the state of all parts: tensors by "part.name", and JSON values by part and name. All ranks call it."""
    states = {name: part.state_dict() for name, part in parts.items()}
    values = {name: {key: x for key, x in state.items() if not isinstance(x, Tensor)} for name, state in states.items()}
    return _flat({name: _tensors(state) for name, state in states.items()}), values


def load_state(
    parts: Mapping[str, Stateful], values: Mapping[str, Mapping[str, Any]], store: CheckpointStore, step: int
) -> None:
    """Restore all parts from the checkpoint of a step. All ranks call it.

    Args:
        parts: the parts of the trainer, by name.
        values: the JSON values that `split_state` returned when the checkpoint was written.
        store: the run's checkpoints.
        step: which of them.
    """
    tensors = {
        name: part.empty_tensors(values.get(name, {})) if isinstance(part, Allocating) else _tensors(part.state_dict())
        for name, part in parts.items()
    }
    store.load(step, _flat(tensors))
    for name, part in parts.items():
        part.load_state_dict({**values.get(name, {}), **tensors[name]})


def _tensors(state: Mapping[str, Any]) -> Tensors:
    return {name: x for name, x in state.items() if isinstance(x, Tensor)}


def _flat(tensors: Mapping[str, Tensors]) -> Tensors:
    return {f"{part}.{name}": x for part, named in tensors.items() for name, x in named.items()}


class ModelState(Stateful):
    """The weights and buffers of the model. `run.model` reads the same tensors without a trainer."""

    def __init__(self, model: nn.Module, parallel: Parallel | None = None) -> None:
        self._model, self._parallel = model, parallel or Parallel()

    def state_dict(self) -> dict[str, Any]:
        """Return the full tensors, or this rank's shards of them, by name."""
        return {name: self._parallel.full(name, x) for name, x in model_tensors(self._model).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy what is not shared with the model already."""
        for name, x in model_tensors(self._model).items():
            self._parallel.from_full_(name, x, state_dict[name])


class OptimizerState(Stateful):
    """The optimizer's moments and step counts, by the parameter's name."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, parallel: Parallel | None = None) -> None:
        self._model, self._optimizer, self._parallel = model, optimizer, parallel or Parallel()

    def state_dict(self) -> dict[str, Any]:
        """Return the moments by "parameter.moment"."""
        return {f"{name}.{key}": self._parallel.full(name, x) for name, key, x in self._moments()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy what is not shared with the optimizer already."""
        for name, key, x in self._moments():
            self._parallel.from_full_(name, x, state_dict[f"{name}.{key}"])

    def _moments(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            for key, x in self._optimizer.state[parameter].items():
                yield name, key, x


class DataState(Stateful):
    """Which step's batch is next, and the fingerprint of the data."""

    def __init__(self, source: BatchSource) -> None:
        self._batches = Batches(source)

    @property
    def step(self) -> int:
        """The step whose batch is next."""
        return self._batches.step

    @step.setter
    def step(self, step: int) -> None:
        """Move to the batch of a step."""
        self._batches.step = step

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the fingerprint."""
        return self._batches.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a step; data with another fingerprint is refused."""
        self._batches.load_state_dict(state_dict)


class RandomState(Stateful):
    """The state of the random number generators. All ranks draw the same numbers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states by device type."""
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators."""
        torch.set_rng_state(state_dict["cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state_dict["cuda"], self._device)


class Throughput(Stateful):
    """Seconds spent in training steps, over all processes that continued the run, and recent tokens per second."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._recent_tokens, self._recent_seconds = 0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a step."""
        self.seconds += seconds
        self._recent_tokens += tokens
        self._recent_seconds += seconds

    def recent(self) -> float:
        """Return the tokens per second since the last call."""
        speed = self._recent_tokens / max(self._recent_seconds, 1e-9)
        self._recent_tokens, self._recent_seconds = 0, 0.0
        return speed

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting."""
        self.seconds = state_dict["seconds"]
