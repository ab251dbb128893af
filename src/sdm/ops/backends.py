"""Which implementations can run here, and which one a call gets."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch._C import _functorch, _get_tracing_state, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from sdm.native import core, missing_because

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
    if requested == "auto" and "native" in supported and _native_obstacle(device, dtype) is None:
        return "native"
    if requested not in ("auto", *supported):
        raise ValueError(f"backend must be one of {('auto', *supported)}, got {requested!r}")
    if requested in ("reference", "chunked"):
        return requested
    if requested == "auto" and in_forward_mode():
        say_once('backend "reference", the slowest, serves this call: it alone has forward-mode derivatives')
        return "reference"
    if "native" not in supported:
        return "chunked"
    obstacle = _native_obstacle(device, dtype)
    if obstacle is None:
        return "native"
    if requested == "native":
        raise ValueError(f'backend "native" cannot serve this call: {obstacle}; use "chunked" or "auto"')
    if device.type == "cpu" and core is not None:  # a missing core was said at import
        say_once(f'backend "chunked", many times slower than "native", serves this call: {obstacle}')
    return "chunked"


def goes_past_dispatcher(*tensors: Tensor) -> bool:
    """Whether the core may be called at once: plain numbers in memory, nobody who traces, batches or differentiates.

    Calls without gradients are often tiny (decoding), and then the dispatcher costs more than the kernel.
    """
    if (
        is_compiling()
        or _len_torch_dispatch_stack() > 0
        or _functorch.peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or in_forward_mode()
    ):
        return False
    records = torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not Tensor or not x.is_cpu or x.is_neg() or (records and x.requires_grad):
            return False
    return True


def in_forward_mode() -> bool:
    """Whether derivatives are taken in forward mode (torch.func.jvp), which registered ops would silently lose."""
    return forward_ad._current_level >= 0


def say_once(message: str) -> None:
    """Warn, but only the first time a message comes up; a compiled graph stays silent."""
    if message not in _said and not torch.compiler.is_compiling():
        _said.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _native_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if core is None:
        return missing_because
    if device.type != "cpu":
        return f"the compiled core works on CPU tensors, got {device}"
    if dtype not in (torch.float32, torch.float64):
        return f"the compiled core computes in float32 or float64, got {dtype}"
    if in_forward_mode():
        return "the compiled core has no forward-mode derivatives"
    return None
