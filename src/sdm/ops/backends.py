"""What a backend of an op is, and which one a call gets.

A backend is declared beside its implementation, and listed in the `__init__.py` of its op. To add one, write its file
and name it there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch, _get_tracing_state, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_exporting

_said: set[str] = set()


class Call:
    """A checked call of an op, as its backends are asked about it and serve it; what is in it, each op says itself."""

    device: torch.device
    dtype: torch.dtype  # of the arithmetic
    single_step: bool = False  # one token, which changes the state in place
    in_place: bool = False  # tokens with a time axis, which change the state in place


@dataclass(eq=False)
class Backend:
    """One implementation of an op."""

    name: str
    run: Callable[[Any], Any]
    """Serves a call."""
    step_: Callable[[Any], Any] | None = None
    """Serves a call of a single step, if it can."""
    device: str | tuple[str, ...] | None = None
    """The kinds of device that it works on; None is any."""
    missing: str = ""
    """Why this machine does not have it, if so."""
    unsupported_call: Callable[[Any], str | None] = lambda call: None
    """Why it cannot serve a call on its device, if so."""
    says_missing: bool = False
    """Whether calls on its device are told that it is missing, unless the import says it or nobody expects it."""
    run_: Callable[[Any], Any] | None = None
    """Serves a call over time that changes the state in place, if it can."""
    onnx: bool = False
    """Whether ONNX has all of the operations that it is made of."""

    def unsupported_reason(self, call: Call, named: bool = True) -> str | None:
        """Why it cannot serve this call, which names it or leaves the choice to "auto"; or None."""
        reason = self.missing or self.device_unsupported_reason(call, named)
        if reason:
            return reason
        if call.single_step and self.step_ is None:
            return "it has no single steps"
        if call.in_place and self.run_ is None:
            return "it has no in-place form"
        if exports_onnx() and not self.onnx:
            return "ONNX does not have its operations"
        return self.unsupported_call(call)

    def device_unsupported_reason(self, call: Call, named: bool) -> str | None:
        """Why it cannot work where the tensors are, or None."""
        return None if self.is_for(call.device) else f"it works on {self.device} tensors, got {call.device}"

    def is_for(self, device: torch.device) -> bool:
        """Whether one expects it to serve calls on this device."""
        return self.device is None or device.type in ((self.device,) if isinstance(self.device, str) else self.device)


BACKENDS: dict[str, list[Backend]] = {}
"""Of each op, fastest first."""


def available_backends(op: str = "sparse_delta_rule") -> tuple[str, ...]:
    """The backends of an op that this machine has, slowest first."""
    return tuple(backend.name for backend in reversed(BACKENDS[op]) if not backend.missing)


def serve(op: str, name: str, call: Call) -> Any:
    """Let the backend of this name serve a call of the op, or with "auto" the first that can."""
    backends, auto, slower_than = BACKENDS[op], name == "auto", ""
    if not auto:
        check_backend(name, op)
    for backend in backends:
        if not auto and name != backend.name:
            continue
        reason = backend.unsupported_reason(call, named=not auto)
        if reason is None:
            if slower_than:
                _say_once(f'backend "{backend.name}", slower than {slower_than}')
            kind = backend.step_ if call.single_step else backend.run_ if call.in_place else backend.run
            assert kind is not None
            return kind(call)
        if not auto:
            able = [other.name for other in backends if other.unsupported_reason(call, named=False) is None]
            raise ValueError(f'backend "{name}" cannot serve this call: {reason}; use "auto" or {_quoted(able)}')
        if not slower_than and backend.is_for(call.device) and (backend.says_missing or not backend.missing):
            slower_than = f'"{backend.name}", serves this call: {reason}'
    raise ValueError(f"no backend of {op} can serve this call: the tokens are on {call.device}, in {call.dtype}")


def check_backend(name: str, *ops: str) -> None:
    """Raise unless each of these ops has a backend of this name, or it is "auto"."""
    if name != "auto" and not all(any(name == backend.name for backend in BACKENDS[op]) for op in ops):
        shared = set.intersection(*({backend.name for backend in BACKENDS[op]} for op in ops))
        raise ValueError(f"backend must be one of {('auto', *sorted(shared))} for {' and '.join(ops)}, got {name!r}")


def _quoted(names: list[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def core_unsupported_reason(call: Call) -> str | None:
    """What the compiled core cannot serve on a CPU, whatever the op."""
    if call.dtype not in (torch.float32, torch.float64):
        return f"the compiled core computes in float32 or float64, got {call.dtype}"
    return no_forward_mode(call)


def no_forward_mode(call: Call) -> str | None:
    """For backends behind a registered op."""
    return "it has no forward-mode derivatives (torch.func.jvp)" if in_forward_mode() else None


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


def exports_onnx() -> bool:
    """Whether torch.onnx.export traces this call."""
    return is_exporting() and _in_onnx_export()


def _in_onnx_export() -> bool:
    return torch.onnx.is_in_onnx_export()


# torch.onnx.export tries dynamo too, which takes torch's own function for False unless it is told to call it. The
# decorator for that, torch.compiler.assume_constant_result, imports dynamo, which takes longer than torch itself.
_in_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]


def in_forward_mode() -> bool:
    """Whether derivatives are taken in forward mode (torch.func.jvp), which registered ops would silently lose."""
    return forward_ad._current_level >= 0


def _say_once(message: str) -> None:
    """Warn whoever called this package, but only the first time a message comes up; a compiled graph stays silent."""
    if message in _said or is_compiling():
        return
    _said.add(message)
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("sdm."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
