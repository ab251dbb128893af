"""Bytes that kernels load and store, counted by Triton's interpreter.

The interpreter sends every load and store through two methods of one object; a block of pointers and a mask tell how
many bytes are asked for. A GPU moves sectors of 32 bytes: what a load asks for touches at least so many of them, and
counting them too shows rows that are cut too narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sdm.ops.triton.launch import Launch, observe

SECTOR = 32  # bytes


@dataclass
class Traffic:
    """Of all programs of a kernel, over all its launches."""

    launches: int = 0
    loaded: int = 0
    stored: int = 0
    loaded_sectors: int = 0
    stored_sectors: int = 0

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.loaded + self.stored

    @property
    def moved_in_sectors(self) -> int:
        """Bytes, where a GPU moves whole sectors."""
        return SECTOR * (self.loaded_sectors + self.stored_sectors)


@contextmanager
def count_traffic() -> Iterator[dict[str, Traffic]]:
    """The traffic of each kernel in a block, by its name. Needs the interpreter."""
    from triton.runtime.interpreter import interpreter_builder as builder

    counts: dict[str, Traffic] = {}
    running: list[Traffic] = []

    def note(launch: Launch) -> None:
        if type(launch.kernel).__name__ != "InterpretedFunction":
            raise RuntimeError("traffic is counted by Triton's interpreter: start Python with TRITON_INTERPRET=1")
        running[:] = [counts.setdefault(launch.name, Traffic())]
        running[0].launches += 1

    def counting(move: Callable[..., Any], mask_at: int, kind: str) -> Callable[..., Any]:
        def counted(pointers: Any, *rest: Any) -> Any:
            size, sectors = _asked_for(pointers, rest[mask_at])
            setattr(running[0], kind, getattr(running[0], kind) + size)
            setattr(running[0], f"{kind}_sectors", getattr(running[0], f"{kind}_sectors") + sectors)
            return move(pointers, *rest)

        return counted

    # Loads and stores without a mask, and those through descriptors, become masked ones. Atomics are not looked at:
    # there are none.
    builder.create_masked_load = counting(builder.create_masked_load, 0, "loaded")
    builder.create_masked_store = counting(builder.create_masked_store, 1, "stored")
    try:
        with observe(note):
            yield counts
    finally:
        del builder.create_masked_load, builder.create_masked_store


def _asked_for(pointers: Any, mask: Any) -> tuple[int, int]:
    """Bytes, and sectors that they lie in."""
    width = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
    address = torch.from_numpy(pointers.data.astype("int64")).flatten()
    address = address[torch.from_numpy(mask.data.astype(bool)).flatten()]
    return address.numel() * width, (address // SECTOR).unique().numel()
