"""Whether Triton is there and new enough, without importing it, and which calls a Triton backend takes."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from sdm.ops.backends import Backend, Call
from sdm.ops.triton.launch import recording, replaced

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


GPUS = ("cuda", "xpu")
"""Kinds of device that Triton compiles for; torch calls AMD's cuda too."""


@dataclass(eq=False, kw_only=True)
class TritonBackend(Backend):
    """A backend for GPUs.

    A CPU call is taken if it names the backend and the interpreter or an emulator runs the kernels, a call without
    memory (meta tensors) if launches are recorded.
    """

    name: str = "triton"
    device: str | tuple[str, ...] | None = GPUS
    missing: str = missing_because(version())
    says_missing: bool = True

    def device_unsupported_reason(self, call: Call, named: bool) -> str | None:
        """Return why the kernels cannot run where the tensors are, or None."""
        kind = call.device.type
        if kind in GPUS or (kind == "meta" and recording()):
            return None
        if named and kind == "cpu":
            if interpreting() or replaced():
                return None
            return (
                f"it works on {' and '.join(GPUS)} tensors, got {call.device}; to run its kernels on the CPU, slowly, "
                "start Python with TRITON_INTERPRET=1"
            )
        return f"it works on {' and '.join(GPUS)} tensors, got {call.device}"
