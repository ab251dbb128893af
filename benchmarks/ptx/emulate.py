"""Lets the compiled kernels of a call run in the emulator.

    with emulated("sm_90") as emulation:
        y, _ = sparse_delta_rule(*cpu_tensors, backend="triton")
    assert not emulation.races.counts

Triton compiles each kernel for the target as a launch on it would; the PTX is executed on the memory of the tensors.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from benchmarks.ptx.machine import Block, Observer
from benchmarks.ptx.memory import Memory, Races
from benchmarks.ptx.program import Program, parse
from numpy.typing import NDArray
from torch import Tensor

from sdm.ops.triton.ahead_of_time import TARGETS, Resources, compile_launch, compiled
from sdm.ops.triton.launch import Launch, run_with


@dataclass
class Ran:
    """What is known of the emulated launches of a kernel."""

    launches: int = 0
    blocks: int = 0
    executed: int = 0
    """Instructions, each counted once for a block."""
    barriers: int = 0


@dataclass
class Emulation:
    """How kernels are emulated, and what was seen.

    `only` maps a kernel's name to a function from the size of its grid to the blocks that are run (default: all).
    `change` may replace a program before it runs. `observer` makes an observer for a block of a launch.
    """

    target: str = "sm_90"
    check_races: bool = True
    only: dict[str, Callable[[int], list[int]]] = field(default_factory=dict)
    change: Callable[[Program], Program] | None = None
    observer: Callable[[Launch, Program, int], Observer | None] | None = None
    races: Races = field(default_factory=Races)
    ran: defaultdict[str, Ran] = field(default_factory=lambda: defaultdict(Ran))
    moment: int = 0

    def run(self, launch: Launch, arguments: dict[str, Any]) -> None:
        """Compile the kernel of a launch and run its blocks on the tensors among the arguments."""
        kernel = compiled(launch, TARGETS[self.target])
        program = _parsed(kernel)
        if self.change is not None:
            program = self.change(program)
        memory, parameters = Memory(), []
        for parameter in launch.kernel.params:
            value = arguments.get(parameter.name)
            if parameter.is_constexpr or value is None:
                continue
            if isinstance(value, Tensor):
                parameters.append(memory.add(_bytes(value, parameter.name), parameter.name, value.element_size()))
            elif isinstance(value, float):
                parameters.append(int(struct.unpack("<I", struct.pack("<f", value))[0]))
            elif value != 1 or parameter.do_not_specialize:  # a 1 is compiled into the kernel
                parameters.append(int(value))
        parameters += [0] * (len(program.parameters) - len(parameters))  # Triton's own scratch memory, unused
        ran = self.ran[launch.name]
        ran.launches += 1
        started = self.moment
        for number in self.only.get(launch.name, lambda size: list(range(size)))(launch.grid[0]):
            observer = self.observer(launch, program, number) if self.observer else None
            block = Block(
                program,
                memory,
                parameters,
                number,
                kernel.metadata.shared,
                self.races if self.check_races else None,
                self.moment,
                started,
                observer,
            )
            block.run()
            self.moment = block.moment + 1
            ran.blocks += 1
            ran.executed += block.executed
            ran.barriers += block.barriers


@contextmanager
def emulated(target: str = "sm_90", **options: Any) -> Iterator[Emulation]:
    """Emulate the kernels that are launched on CPU tensors in this block. Options are the fields of `Emulation`."""
    emulation = Emulation(target, **options)
    with run_with(emulation.run):
        yield emulation


_programs: dict[str, Program] = {}
_resources: dict[tuple[str, str], Resources] = {}


def _parsed(kernel: Any) -> Program:
    if kernel.hash not in _programs:
        _programs[kernel.hash] = parse(kernel.asm["ptx"])
    return _programs[kernel.hash]


def resources(launch: Launch, target: str) -> Resources:
    """What the kernel takes, looked up once."""
    key = compiled(launch, TARGETS[target]).hash, target
    if key not in _resources:
        _resources[key] = compile_launch(launch, TARGETS[target])
    return _resources[key]


def _bytes(x: Tensor, name: str) -> NDArray[np.uint8]:
    """The memory of a tensor, not a copy of it."""
    if not x.is_contiguous():
        raise ValueError(f"{name} is not contiguous: kernels are given contiguous tensors")
    flat = x.detach().reshape(-1).view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8)
    data: NDArray[np.uint8] = flat.numpy()
    return data
