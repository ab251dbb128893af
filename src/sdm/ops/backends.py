"""Which implementations can run here, and which one a call gets."""

from __future__ import annotations

import warnings

import torch

from sdm.native import core

BACKENDS = ("reference", "chunked", "native")

_said: set[str] = set()


def available_backends() -> tuple[str, ...]:
    """The backends that can run on this machine, slowest first."""
    return tuple(name for name in BACKENDS if name != "native" or core is not None)


def choose_backend(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    supported: tuple[str, ...] = BACKENDS,
) -> str:
    """Resolve "auto" for tensors of this device and compute dtype, or check that an explicit choice can serve them.

    An explicit backend that cannot serve raises; "auto" takes the fastest that can, and says once where that is slow.
    """
    if requested not in ("auto", *supported):
        raise ValueError(f"backend must be one of {('auto', *supported)}, got {requested!r}")
    if requested in ("reference", "chunked"):
        return requested
    if "native" not in supported:
        return "chunked"
    obstacle = _native_obstacle(device, dtype)
    if obstacle is None:
        return "native"
    if requested == "native":
        raise ValueError(f'backend "native" cannot serve this call: {obstacle}; use "chunked" or "auto"')
    if device.type == "cpu":
        say_once(f'backend "chunked", many times slower than "native", serves this call: {obstacle}')
    return "chunked"


def say_once(message: str) -> None:
    """Warn, but only the first time a message comes up; a compiled graph stays silent."""
    if message not in _said and not torch.compiler.is_compiling():
        _said.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _native_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if core is None:
        return "the compiled core is missing (reinstall sparse-delta-memory where a C++ compiler is present)"
    if device.type != "cpu":
        return f"the compiled core works on CPU tensors, got {device}"
    if dtype not in (torch.float32, torch.float64):
        return f"the compiled core computes in float32 or float64, got {dtype}"
    return None
