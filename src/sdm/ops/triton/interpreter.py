"""Triton's interpreter, without its largest waste of time and without warnings that a GPU does not give; and the bytes
that kernels load and store, counted by it.

The interpreter sends every load and store through two methods of one object; a block of pointers and a mask tell how
many bytes are asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType

from triton import language
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle
from triton.runtime.interpreter import interpreter_builder as builder

from sdm.ops.triton.launch import Launch, observe

Move = Callable[..., object]
"""A load or store of the interpreter."""


@contextmanager
def quick_and_quiet() -> Iterator[None]:
    """During one launch, prepare each module of the language once, and let infinities and NaN come up silently.

    The interpreter replaces the functions of `triton.language` before it runs a kernel, and again before each function
    that the kernel calls, `tl.sum` included: more than half of its time in kernels made of small functions.
    """
    prepare, done = interpreter._patch_lang, set()

    def prepare_once(function: FunctionType) -> object:
        modules = frozenset(id(x) for x in function.__globals__.values() if x is language or x is language.core)
        if modules in done:
            return interpreter._LangPatchScope()
        done.add(modules)
        return prepare(function)

    interpreter._patch_lang = prepare_once
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        interpreter._patch_lang = prepare


@dataclass
class Traffic:
    """Of all programs of a kernel, over all its launches."""

    launches: int = 0
    loaded: int = 0
    stored: int = 0

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.loaded + self.stored


@contextmanager
def count_traffic() -> Iterator[dict[str, Traffic]]:
    """The traffic of each kernel in a block, by its name. Needs the interpreter."""
    counts: dict[str, Traffic] = {}
    running: list[Traffic] = []

    def note(launch: Launch) -> None:
        if type(launch.kernel).__name__ != "InterpretedFunction":
            raise RuntimeError("traffic is counted by Triton's interpreter: start Python with TRITON_INTERPRET=1")
        running[:] = [counts.setdefault(launch.name, Traffic())]
        running[0].launches += 1

    def counting(move: Move, mask_at: int, kind: str) -> Move:
        def counted(pointers: TensorHandle, *rest: TensorHandle) -> object:
            setattr(running[0], kind, getattr(running[0], kind) + _asked_for(pointers, rest[mask_at]))
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


def _asked_for(pointers: TensorHandle, mask: TensorHandle) -> int:
    """The bytes that a load or store touches."""
    width = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
    return int(mask.data.astype(bool).sum()) * width
