"""The state of a layer, and the records that take tokens back: named tensors whose first axis is the stream.

A stream is a batch row or a document. A state may hold the state of a layer within the layer; the names of its tensors
are then joined by dots. Code that stores, reorders, repeats, forks, saves or rewinds a state needs these methods and
nothing of the layer.

Shapes: S streams, T time, H heads, K key channels, D value channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from sdm.ops.checks import check_shape, check_tensor

StateT = TypeVar("StateT", bound="LayerState")
UndoT = TypeVar("UndoT", bound="Undo")
RestoredT = TypeVar("RestoredT", bound="LayerState", contravariant=True)


_FIELD_NAMES: dict[Any, tuple[str, ...]] = {}  # looking them up takes a good part of a decode step


@dataclasses.dataclass
class LayerState:
    """Base of all states: dataclasses whose fields are tensors or states."""

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name, such as "memory", or "inner.memory" within a state."""
        named: dict[str, Tensor] = {}
        for own in self._field_names():
            part = getattr(self, own)
            if isinstance(part, LayerState):
                named |= {f"{own}.{name}": x for name, x in part.tensors().items()}
            else:
                named[own] = part
        return named

    def with_tensors(self: StateT, tensors: Mapping[str, Tensor]) -> StateT:
        """Return a state of this type made of other tensors, given by the names of `tensors()`."""
        parts: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            part, prefix = getattr(self, field.name), f"{field.name}."
            if isinstance(part, LayerState):
                own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
                parts[field.name] = part.with_tensors(own)
            else:
                parts[field.name] = tensors[field.name]
        return type(self)(**parts)

    def map(self: StateT, function: Callable[[Tensor], Tensor]) -> StateT:
        """Apply `function` to each tensor, e.g. `lambda x: x.index_select(0, streams)`."""
        return self.with_tensors({name: function(x) for name, x in self.tensors().items()})

    def restarted(self: StateT, begins: Tensor, fresh: StateT) -> StateT:
        """Return the state in which the streams where `begins` [S] is True are those of `fresh`."""
        new = fresh.tensors()

        def choose(name: str, old: Tensor) -> Tensor:
            return torch.where(begins.view(-1, *[1] * (old.dim() - 1)), new[name].to(old.dtype), old)

        return self.with_tensors({name: choose(name, x) for name, x in self.tensors().items()})

    def trimmed(self: StateT) -> StateT:
        """Return the state of a single stream without room for tokens to come."""
        return self

    def stacked(self: StateT, others: Sequence[StateT]) -> StateT:
        """Return the state of the streams of this state and then of `others`, which are of the same layer."""
        parts: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            part, further = getattr(self, field.name), [getattr(other, field.name) for other in others]
            parts[field.name] = part.stacked(further) if isinstance(part, LayerState) else torch.cat([part, *further])
        return type(self)(**parts)

    def undo_of(self, tensors: Mapping[str, Tensor]) -> Undo:
        """Return the undo record of a state of this type that has these tensors, as a file has them."""
        prefix = "before."
        if tensors and all(name.startswith(prefix) for name in tensors):
            return Snapshot(self.with_tensors({name.removeprefix(prefix): x for name, x in tensors.items()}))
        return self._undo_type()(**tensors)

    def _field_names(self) -> tuple[str, ...]:
        kind = type(self)
        if kind not in _FIELD_NAMES:
            _FIELD_NAMES[kind] = tuple(field.name for field in dataclasses.fields(self))
        return _FIELD_NAMES[kind]

    def _undo_type(self) -> type[Undo]:
        raise NotImplementedError(f"{type(self).__name__} does not say what its undo records are")

    def assign_(self: StateT, other: StateT) -> None:
        """Make this state refer to the tensors of another one."""
        for field in dataclasses.fields(self):
            part, new = getattr(self, field.name), getattr(other, field.name)
            if isinstance(part, LayerState):
                part.assign_(new)
            else:
                setattr(self, field.name, new)

    @property
    def streams(self) -> int:
        """Number of streams that the state holds."""
        part = getattr(self, self._field_names()[0])
        return part.streams if isinstance(part, LayerState) else len(part)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, field.name).nbytes for field in dataclasses.fields(self))


@dataclasses.dataclass
class Undo(LayerState, Generic[RestoredT]):
    """A record of what a layer needs to take back the tokens of one call.

    A state makes the record before it changes, by its own method `undo`, so that a type of layer decides itself what to
    keep: the rows of a table that are about to change, or a copy of a small state. A record is made of tensors whose
    first axis is the stream, like a state, so that it can be reordered, saved and counted like one.
    """

    over_time: ClassVar[tuple[str, ...]] = ()
    """Fields with a second axis T: what it takes to replay the tokens that are kept."""

    def restore_(self, state: RestoredT) -> None:
        """Set `state` to what it was before the tokens. The record may not be used again."""
        raise NotImplementedError

    def first(self: UndoT, tokens: int) -> UndoT:
        """Return the record of the first `tokens` tokens of the call."""
        parts = {}
        for field in dataclasses.fields(self):
            part = getattr(self, field.name)
            if isinstance(part, Undo):
                part = part.first(tokens)
            elif field.name in self.over_time:
                part = part[:, :tokens]
            parts[field.name] = part
        return type(self)(**parts)


Record = Callable[[Undo], None]
"""What a layer hands its undo records to."""


@dataclasses.dataclass
class Snapshot(Undo[LayerState]):
    """The whole state before the tokens. Kept tokens cannot be replayed from it."""

    before: LayerState

    def restore_(self, state: LayerState) -> None:
        """Set `state` to the snapshot."""
        state.assign_(self.before)


def check_state(
    state: object, kind: type[LayerState], streams: int, device: torch.device, **shapes: tuple[int | None, ...]
) -> None:
    """Raise unless `state` is a `kind` whose tensors have these shapes for each stream; None is any size."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be a {kind.__name__} or None, got {type(state).__name__}")
    for name, shape in shapes.items():
        x = getattr(state, name)
        check_tensor(f"state.{name}", x, device)
        check_shape(f"state.{name}", x, (streams, *shape), "of this layer and one per row or document of x")


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
