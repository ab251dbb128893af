"""Which calls a Triton backend takes."""

from __future__ import annotations

from dataclasses import dataclass

from sdm.ops.backends import Backend, Call
from sdm.ops.triton.availability import interpreting, missing_because, version
from sdm.ops.triton.launch import dry_running, recording, replaced

GPUS = ("cuda", "xpu")
"""Kinds of device that Triton compiles for; torch calls AMD's cuda too."""


@dataclass(eq=False, kw_only=True)
class TritonBackend(Backend):
    """A backend for GPUs.

    A CPU call is taken if it names the backend and the interpreter or an emulator runs the kernels, a call without
    memory (meta tensors) if launches are recorded. In a dry run a CPU call that names the backend needs no Triton.
    """

    name: str = "triton"
    device: str | tuple[str, ...] | None = GPUS
    missing: str = missing_because(version())
    says_missing: bool = True

    def unsupported_reason(self, call: Call, named: bool = True) -> str | None:
        """Why it cannot serve this call, or None."""
        if named and dry_running():
            return self.unsupported_call(call)
        return super().unsupported_reason(call, named)

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
