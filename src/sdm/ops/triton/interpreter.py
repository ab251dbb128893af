"""Triton's interpreter, without its largest waste of time and without warnings that a GPU does not give."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton import language
from triton.runtime import interpreter


@contextmanager
def quick_and_quiet() -> Iterator[None]:
    """During one launch, prepare each module of the language once, and let infinities and NaN come up silently.

    The interpreter replaces the functions of `triton.language` before it runs a kernel, and again before each function
    that the kernel calls, `tl.sum` included: more than half of its time in kernels made of small functions.
    """
    prepare, done = interpreter._patch_lang, set()

    def prepare_once(function: Any) -> Any:
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
