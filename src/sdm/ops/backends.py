"""Which implementations can run here, and which one a call gets."""

from __future__ import annotations

import functools
import importlib
import warnings

import torch

BACKENDS = ("reference", "chunked", "native")


@functools.cache
def native_unavailable() -> str | None:
    """Why the compiled core cannot be used, or None if it can."""
    try:
        importlib.import_module("sdm.native._core")
    except ImportError as error:
        return str(error)
    return None


def available_backends() -> tuple[str, ...]:
    """The backends that can run on this machine, slowest first."""
    return tuple(name for name in BACKENDS if name != "native" or native_unavailable() is None)


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


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

    obstacle = _native_obstacle(device, dtype)
    if "native" not in supported:
        return "chunked"
    if obstacle is None:
        return "native"
    if requested == "native":
        raise ValueError(f'backend "native" cannot serve this call: {obstacle}; use "chunked" or "auto"')
    if device.type == "cpu" and native_unavailable() is not None:
        _say_once(
            f"the compiled CPU core of sparse-delta-memory is missing ({native_unavailable()}): the PyTorch fallback "
            '"chunked" runs instead, more than ten times slower. Reinstall the package where a C++ compiler is present.'
        )
    return "chunked"


def _native_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if (missing := native_unavailable()) is not None:
        return f"the compiled core is missing ({missing})"
    if device.type != "cpu":
        return f"it runs on CPU tensors, got {device}"
    if dtype not in (torch.float32, torch.float64):
        return f"it computes in float32 or float64, got {dtype}"
    return None
