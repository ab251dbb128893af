"""Bytes of tensors that are alive, op by op: with tensors that have no memory, what they would take."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_RECURRENCE = "sdm.sparse_delta_rule_backward"


class Live(TorchDispatchMode):
    """Counts what ops make while it is entered, and until nobody holds it any more.

    Args:
        known: tensors that were there before, and are not counted, nor are views of them.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.in_recurrence = 0
        """Most of all when a memory's tables are at work too, which the op has to itself."""
        self._sizes = {x.untyped_storage()._cdata: 0 for x in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self._add(x)
        self.peak = max(self.peak, self.now)
        if str(func).startswith(_RECURRENCE):
            self.in_recurrence = max(self.in_recurrence, self.now)
        return made

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        place = storage._cdata
        if place not in self._sizes:
            self._sizes[place] = storage.nbytes()
            self.now += self._sizes[place]
            weakref.finalize(storage, self._drop, place)

    def _drop(self, place: int) -> None:
        self.now -= self._sizes.pop(place)
