"""Whether Triton is there and new enough, without importing it, and whether its interpreter stands in for a GPU."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

MINIMUM = (3, 4)
"""The Triton of the oldest torch that this package works with."""


@cache
def version() -> str:
    """The installed version, or nothing.

    Packages of different names bring the module (`triton`, `pytorch-triton-rocm`, `pytorch-triton-xpu`), and importing
    it takes half a second: the version is read from its source.
    """
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return ""
    match = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", Path(spec.origin).read_text(), re.MULTILINE)
    return match[1] if match else "of unknown version"


def missing_because(installed: str) -> str:
    """Why kernels cannot be used with this version, or nothing."""
    wanted = ".".join(map(str, MINIMUM))
    if not installed:
        return f"Triton is not installed (pip install 'triton>={wanted}'; torch for GPUs brings it)"
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < MINIMUM:
        return f"Triton {installed} is too old, {wanted} or newer is needed (pip install 'triton>={wanted}')"
    return ""


def interpreting() -> bool:
    """Whether kernels are run by Triton's interpreter, on the CPU.

    The variable counts where Triton is first imported, which is when it makes its functions.
    """
    loaded = sys.modules.get("triton")
    if loaded is not None and hasattr(loaded, "language"):
        return type(loaded.language.sum).__name__ == "InterpretedFunction"
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def description() -> str:
    """One line for people."""
    installed = version()
    problem = missing_because(installed)
    if problem:
        return problem
    return f"Triton {installed}" + (", interpreting kernels on the CPU" if interpreting() else "")
