"""The parts of a trainer: what the next step depends on, each with its share of a checkpoint.

A part owns tensors, by names of its own, and a note of plain JSON. Continuing takes two steps, so that all tensors are
read at once: the part makes room for what the note describes, and takes over what was read into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sdm.data.batch import BatchSource
from sdm.data.loader import Batches
from sdm.models import SDMForCausalLM
from sdm.run.checkpoint import CheckpointStore
from sdm.run.export import model_tensors
from sdm.training.parallel import Parallel

Tensors = dict[str, Tensor]


class Part:
    """One of them. What is not overridden is for a part whose tensors are filled in place and say everything."""

    def tensors(self) -> Tensors:
        """What a checkpoint holds of it, by name."""
        return {}

    def note(self) -> Any:
        """What a checkpoint says of it, as JSON; None: nothing."""
        return None

    def room(self, note: Any) -> Tensors:
        """Tensors to be filled with those of a checkpoint that has this note, by the names that they have there."""
        return self.tensors()

    def take(self, note: Any, tensors: Tensors) -> None:
        """Go on from the note and from the filled tensors of `room`."""


def tensors_of(parts: Mapping[str, Part]) -> Tensors:
    return _named({name: part.tensors() for name, part in parts.items()})


def notes_of(parts: Mapping[str, Part]) -> dict[str, Any]:
    notes = {name: part.note() for name, part in parts.items()}
    return {name: note for name, note in notes.items() if note is not None}


def take(parts: Mapping[str, Part], notes: Mapping[str, Any], store: CheckpointStore, step: int) -> None:
    """Let all parts go on from the checkpoint of a step."""
    rooms = {name: part.room(notes.get(name)) for name, part in parts.items()}
    store.load(step, _named(rooms))
    for name, part in parts.items():
        part.take(notes.get(name), rooms[name])


def _named(tensors: Mapping[str, Tensors]) -> Tensors:
    return {f"{part}.{name}": x for part, named in tensors.items() for name, x in named.items()}


class Weights(Part):
    """The model. `run.model` reads the same tensors without a trainer."""

    def __init__(self, model: SDMForCausalLM, parallel: Parallel | None = None) -> None:
        self._model, self._parallel = model, parallel or Parallel()

    def tensors(self) -> Tensors:
        return {name: self._parallel.full(name, x) for name, x in model_tensors(self._model).items()}

    def take(self, note: Any, tensors: Tensors) -> None:
        for name, x in model_tensors(self._model).items():
            self._parallel.from_full_(name, x, tensors[name])


class Moments(Part):
    """What the optimizer remembers of each parameter, by the parameter's name."""

    def __init__(
        self, model: SDMForCausalLM, optimizer: torch.optim.Optimizer, parallel: Parallel | None = None
    ) -> None:
        self._model, self._optimizer, self._parallel = model, optimizer, parallel or Parallel()

    def tensors(self) -> Tensors:
        return {f"{name}.{key}": self._parallel.full(name, x) for name, key, x in self._moments()}

    def take(self, note: Any, tensors: Tensors) -> None:
        for name, key, x in self._moments():
            self._parallel.from_full_(name, x, tensors[f"{name}.{key}"])

    def _moments(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            for key, x in self._optimizer.state[parameter].items():
                yield name, key, x


class DataPosition(Part):
    """Which step's batch is next."""

    def __init__(self, source: BatchSource) -> None:
        self._batches = Batches(source)

    @property
    def step(self) -> int:
        return self._batches.step

    @step.setter
    def step(self, step: int) -> None:
        self._batches.step = step

    def note(self) -> Any:
        return self._batches.state_dict()

    def take(self, note: Any, tensors: Tensors) -> None:
        self._batches.load_state_dict(note)


class RandomNumbers(Part):
    """Where the generators stand. All ranks draw the same numbers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def tensors(self) -> Tensors:
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def take(self, note: Any, tensors: Tensors) -> None:
        torch.set_rng_state(tensors["cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(tensors["cuda"], self._device)


class Speed(Part):
    """Seconds spent in training steps, over all of a run's processes, and tokens per second since the last look."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._recent_tokens, self._recent_seconds = 0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.seconds += seconds
        self._recent_tokens += tokens
        self._recent_seconds += seconds

    def recent(self) -> float:
        speed = self._recent_tokens / max(self._recent_seconds, 1e-9)
        self._recent_tokens, self._recent_seconds = 0, 0.0
        return speed

    def note(self) -> Any:
        return {"seconds": self.seconds}

    def take(self, note: Any, tensors: Tensors) -> None:
        self.seconds = note["seconds"]
