"""What a layer remembers: named tensors, with one entry per stream (batch row or document) first in each.

A state may hold the state of a layer within the layer; the names of its tensors are then joined by dots. Whoever
stores, reorders, repeats, forks or writes down a state needs these methods and nothing of the layer.

Shapes: S streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from sdm.ops.checks import check_shape, check_tensor

StateT = TypeVar("StateT", bound="LayerState")
T = TypeVar("T")


@dataclasses.dataclass
class LayerState:
    """Base of all states: dataclasses whose fields are tensors or states."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name, such as "memory", or "inner.memory" within a state."""
        found: dict[str, Tensor] = {}
        for field in dataclasses.fields(self):
            part = getattr(self, field.name)
            if isinstance(part, LayerState):
                found |= {f"{field.name}.{name}": x for name, x in part.tensors().items()}
            else:
                found[field.name] = part
        return found

    def with_tensors(self: StateT, tensors: Mapping[str, Tensor]) -> StateT:
        """A state of this kind made of other tensors, given by the names of `tensors()`."""
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
        """The state with `function` applied to each tensor, e.g. `lambda x: x.index_select(0, streams)`."""
        return self.with_tensors({name: function(x) for name, x in self.tensors().items()})

    def restarted(self: StateT, begins: Tensor, fresh: StateT) -> StateT:
        """The state in which the streams where `begins` [S] is True are those of `fresh`."""
        new = fresh.tensors()

        def choose(name: str, old: Tensor) -> Tensor:
            return torch.where(begins.view(-1, *[1] * (old.dim() - 1)), new[name].to(old.dtype), old)

        return self.with_tensors({name: choose(name, x) for name, x in self.tensors().items()})

    def trimmed(self: StateT) -> StateT:
        """The state of a single stream without room for tokens to come."""
        return self

    @property
    def streams(self) -> int:
        """Number of streams that the state holds."""
        return len(next(iter(self.tensors().values())))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors().values())


def check_state(state: Any, kind: type[LayerState], streams: int, device: torch.device, **shapes: Any) -> None:
    """Raise unless `state` is a `kind` whose tensors have these shapes for each stream; None is any size."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be a {kind.__name__} or None, got {type(state).__name__}")
    for name, shape in shapes.items():
        x = getattr(state, name)
        check_tensor(f"state.{name}", x, device)
        check_shape(f"state.{name}", x, (streams, *shape), "of this layer and one per row or document of x")


def current_names(found: Mapping[str, T], state: LayerState) -> dict[str, T]:
    """What was written down of a state like this one, by the names of today.

    Older versions called a memory that was a tensor by itself "state", wrote the parts of a state within a state
    without a prefix, and gave layers without a convolution an empty "tail".
    """
    expected, named = state.tensors(), {}
    for name, x in found.items():
        aliases = (name, f"inner.{name}", "memory" if name == "state" else name)
        today = next((alias for alias in aliases if alias in expected), name)
        if today in expected or name != "tail":
            named[today] = x
    return named
