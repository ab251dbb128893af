"""Recorded launches compiled for GPUs that are not here, and what the compiled kernels take.

Triton's own compiler is asked as it would be at the launch, with a driver in place that only knows the target, so that
types, alignments and constants are specialised as they are on a GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from sdm.ops.triton.launch import NVIDIA_OPTIONS, Launch, Pointer


@dataclass(frozen=True)
class Target:
    """A GPU to compile for."""

    name: str
    gpu: GPUTarget
    shared_limit: int
    """Bytes of shared memory that a program can have."""


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", GPUTarget("cuda", 80, 32), 163 * 1024),
        Target("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024),
    )
}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes."""

    registers: int
    """Of a thread; on AMD vector registers, with those for matrix products."""
    spilled: int
    """Bytes of a thread's own memory, where what found no register goes."""
    shared: int
    """Bytes of a program."""
    parked: int = 0
    """AMD: scalar registers too few, of values that wait in lanes of a vector register. Memory is not touched."""

    def problem(self, target: Target) -> str | None:
        """Why this is not good enough, or None."""
        if self.spilled:
            return f"spills {self.spilled} bytes of registers per thread"
        if self.shared > target.shared_limit:
            return f"takes {self.shared} bytes of shared memory, {target.name} has {target.shared_limit}"
        return None


def compiled(launch: Launch, target: Target) -> Any:
    """Triton's compiled kernel of this launch on the target; raises what Triton's compiler raises."""
    if not isinstance(launch.kernel, triton.JITFunction):
        raise RuntimeError("the interpreter does not compile: start Python without TRITON_INTERPRET")
    arguments = {name: _stand_in(x) for name, x in launch.arguments.items()}
    foreign = () if target.gpu.backend == "cuda" else NVIDIA_OPTIONS
    options = {name: x for name, x in launch.options.items() if name not in foreign}
    with _driver_for(target):
        return launch.kernel.run(**arguments, **options, grid=launch.grid, warmup=True)


def compile_launch(launch: Launch, target: Target) -> Resources:
    """What the kernel of this launch takes on the target; raises what Triton's compiler raises."""
    kernel = compiled(launch, target)
    if target.gpu.backend == "cuda":
        return _of_cubin(kernel.asm["cubin"], kernel.metadata.shared)
    return _of_amdgcn(kernel.asm["amdgcn"], kernel.metadata.shared)


def machine_code(launch: Launch, target: Target) -> Counter[str]:
    """How often each instruction, with its modifiers, is in the machine code (SASS) of the kernel on an NVIDIA GPU."""
    text = _cuobjdump(compiled(launch, target).asm["cubin"], "-sass")
    return Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE))


def code_problem(launch: Launch, target: Target) -> str | None:
    """What the machine code has that the kernel must not have, or None.

    A load through the read-only path (LDG.CONSTANT) does not see what the kernel itself has stored: no kernel may have
    one, for its table is read and written. Memory of a thread's own (LDL, STL) means spilled registers.
    """
    code = machine_code(launch, target)
    if not any(name.startswith("EXIT") for name in code):
        return "has machine code that cannot be read"
    constant = [name for name in code if name.startswith("LDG") and "CONSTANT" in name]
    if constant:
        return f"reads memory as if nothing wrote to it: {', '.join(constant)}"
    local = [name for name in code if name.startswith(("LDL", "STL"))]
    return f"keeps registers in memory: {', '.join(local)}" if local else None


class _StandIn:
    """A tensor as far as the compiler looks at it."""

    def __init__(self, pointer: Pointer) -> None:
        self.dtype = pointer.dtype
        self._address = 0 if pointer.aligned else self.dtype.itemsize
        self._near = pointer.near

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return 0 if self._near else 2**62


def _stand_in(x: object) -> object:
    return _StandIn(x) if isinstance(x, Pointer) else x


class _Driver:
    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target.gpu

    def get_current_device(self) -> str:
        return self.target.name

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def _driver_for(target: Target) -> Iterator[None]:
    before = driver._active
    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        driver._active = before


def _of_cubin(cubin: bytes, shared: int) -> Resources:
    said = _cuobjdump(cubin, "--dump-resource-usage")
    (registers,) = re.findall(r"REG:(\d+)", said)
    (stack,) = re.findall(r"STACK:(\d+)", said)
    (local,) = re.findall(r"LOCAL:(\d+)", said)
    return Resources(int(registers), int(stack) + int(local), shared)


def _cuobjdump(cubin: bytes, option: str) -> str:
    """What the tool that Triton brings says of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, option, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _of_amdgcn(assembly: str, shared: int) -> Resources:
    def count(name: str) -> int:
        return sum(int(x) for x in re.findall(rf"\.{name}:\s*(\d+)", assembly))

    # A register is four bytes; the memory of a thread's own holds the spilled ones too. Scalars get there only if
    # no lane of a vector register is left for them.
    spilled = max(4 * count("vgpr_spill_count"), count("private_segment_fixed_size"))
    registers = max(count("vgpr_count"), count("agpr_count"))
    return Resources(registers, spilled, shared, count("sgpr_spill_count"))
