"""Modelled time of the Triton kernels of a sparse delta memory.

**A model, not a measurement.** `python -m benchmarks.triton_model --store` runs the compiled kernels of each ladder
level in an emulator and writes to `kernels.json` what a block of them needs: cycles of waiting, issue slots, bytes.
Everything here is arithmetic on these numbers, so that `sdm plan` needs neither the emulator nor Triton.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from sdm.ops.sparse_delta_rule.triton.layout import BACKWARD, FORWARD, Accesses, Layout

STORED = Path(__file__).with_name("kernels.json")
ACCESSES = 64  # writes and reads of a token in the stored numbers


@dataclass(frozen=True)
class GPU:
    """What the model knows of a GPU. Latencies are in cycles."""

    name: str
    target: str
    multiprocessors: int
    clock: float
    bandwidth: float
    """Bytes per second of memory, as the vendor states it."""
    l2: float
    """Bytes of the L2 cache."""
    shared: int
    """Bytes of shared memory of a multiprocessor."""
    l2_latency: float
    memory_latency: float
    shared_latency: float = 30
    shuffle: float = 24
    barrier: float = 32
    arithmetic: float = 4.5
    fill: float = 64
    """Bytes per cycle between the L2 cache and a multiprocessor."""
    registers: int = 65536
    warps: int = 64
    efficiency: float = 0.9
    """Of the bandwidth that scattered rows reach at best."""

    def resident(self, threads: int, registers: int, shared: int) -> int:
        """How many blocks share a multiprocessor, by threads of a block, registers of a thread and shared memory."""
        limits = [self.registers // (-(-registers // 8) * 8 * threads), self.warps // -(-threads // 32), 32]
        limits.append(self.shared // max(shared + 1024, 1))
        return max(min(limits), 1)


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A100", "sm_80", 108, 1.41e9, 2.04e12, 40e6, 164 << 10, 240, 620),
        GPU("H100", "sm_90", 132, 1.70e9, 3.35e12, 50e6, 228 << 10, 273, 700),
    )
}


@dataclass
class Usage:
    """What a block needs: cycles, and bytes of memory."""

    in_order: float = 0.0
    """Cycles of a block alone, if instructions start in the order of the PTX."""
    reordered: float = 0.0
    """The same with the best order between barriers."""
    issue: float = 0.0
    """Cycles in which its instructions would take the issue slots of all schedulers."""
    path: float = 0.0
    """Cycles in which its loads and stores take the path to the L2 cache."""
    memory: float = 0.0
    """Bytes from and to memory."""
    barriers: float = 0.0

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))

    def __mul__(self, factor: float) -> Usage:
        return Usage(*(getattr(self, name) * factor for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Estimate:
    """Seconds of launches: a range."""

    low: float = 0.0
    high: float = 0.0
    bandwidth: float = 0.0
    """Seconds that memory needs for their bytes."""

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.low + other.low, self.high + other.high, self.bandwidth + other.bandwidth)

    def __mul__(self, factor: float) -> Estimate:
        return Estimate(self.low * factor, self.high * factor, self.bandwidth * factor)


def estimate(gpu: GPU, usage: Usage, blocks: float, threads: int, registers: int, shared: int) -> Estimate:
    """How long a launch of equal blocks takes.

    Multiprocessors take blocks in turns of as many as fit. Those of a turn overlap their waiting; a turn takes as long
    as a block alone, or as the issue slots and the path to the L2 cache need for all of them. No launch is faster than
    memory.
    """
    fit = gpu.resident(threads, registers, shared)
    turns, rest = divmod(blocks, gpu.multiprocessors * fit)
    last = -(-rest // gpu.multiprocessors)
    least = blocks * usage.memory / (gpu.bandwidth * gpu.efficiency)
    ends = []
    for alone in (usage.reordered, usage.in_order):
        cycles = turns * max(alone, fit * usage.issue, fit * usage.path)
        if last:
            cycles += max(alone, last * usage.issue, last * usage.path)
        ends.append(max(cycles / gpu.clock, least))
    return Estimate(min(ends), max(ends), least)


@dataclass(frozen=True)
class Kernel:
    """What a block of a kernel needs, and how many there are."""

    usage: Usage
    """Of a token if the block walks a sequence, else of the block's tokens."""
    registers: int
    shared: int
    threads: int
    backward: bool
    tokens: float = 0.0
    """Tokens (of one head) for each block; 0: the block walks a sequence."""
    channels: int = 0
    """Value channels of a block that walks a sequence."""
    per_slab: int = 0
    """If not 0: the usage is that of so many channels, and grows with them."""
    spilled: int = 0
    """Bytes of registers that a thread keeps in memory."""

    def time(self, gpu: GPU, streams: int, time: int, channels: int, scale: float = 1.0) -> Estimate:
        """Of the launches of a call with so many sequences times heads; `scale` multiplies the usage."""
        usage = self.usage * scale * (channels / self.per_slab if self.per_slab else 1)
        taken = self.threads, self.registers, self.shared
        if self.tokens:
            return estimate(gpu, usage, streams * -(-time // self.tokens), *taken)
        return estimate(gpu, usage * time, streams * -(-channels // self.channels), *taken)

    def stored(self) -> dict[str, Any]:
        """The kernel as JSON."""
        numbers = {name: round(getattr(self.usage, name), 3) for name in self.usage.__dataclass_fields__}
        names = (name for name in self.__dataclass_fields__ if name != "usage")
        return {"usage": numbers, **{name: getattr(self, name) for name in names}}

    @staticmethod
    def load(stored: dict[str, Any]) -> Kernel:
        """The kernel of `stored`."""
        return Kernel(**{**stored, "usage": Usage(**stored["usage"])})


@cache
def stored_kernels() -> dict[str, dict[str, dict[str, dict[str, Kernel]]]]:
    """The kernels of `kernels.json` by GPU, sizes (heads x channels), layout and name."""
    return {
        gpu: {
            sizes: {
                layout: {name: Kernel.load(x) for name, x in kernels.items()} for layout, kernels in layouts.items()
            }
            for sizes, layouts in by_sizes.items()
        }
        for gpu, by_sizes in json.loads(STORED.read_text())["kernels"].items()
    }


def nearest_sizes(gpu: str, heads: int, channels: int, layout: str) -> str:
    """The stored sizes with this layout that are nearest: heads are compared first, then channels."""

    def distance(sizes: str) -> tuple[int, int]:
        stored_heads, stored_channels = map(int, sizes.split("x"))
        return abs(stored_heads - heads), abs(stored_channels - channels)

    return min((sizes for sizes, layouts in stored_kernels()[gpu].items() if layout in layouts), key=distance)


@dataclass(frozen=True)
class MemoryCall:
    """A call of the sparse delta rule with the selection of its slots, as one rank makes it."""

    batch: int
    time: int
    heads: int
    channels: int
    """Of a head."""
    writes: int = ACCESSES
    reads: int = ACCESSES

    def seconds(self, gpu: GPU, bandwidth: float | None = None) -> tuple[Estimate, Estimate]:
        """Forward and backward.

        Kernels are those of the stored sizes nearest to the call's. Another number of accesses or channels of a program
        changes what a token needs in proportion.

        Args:
            gpu: a GPU of the model.
            bandwidth: bytes per second, if the device is this GPU with another memory.
        """
        if bandwidth is not None:
            gpu = replace(gpu, bandwidth=bandwidth)
        totals = {False: Estimate(), True: Estimate()}
        for backward, limits in ((False, FORWARD), (True, BACKWARD)):
            layout, name = self._layout(limits)
            scale = (layout.WP + layout.RP) / (2 * ACCESSES)
            sizes = nearest_sizes(gpu.name, self.heads, self.channels, name)
            for kernel in stored_kernels()[gpu.name][sizes][name].values():
                if kernel.backward == backward:
                    wide = scale * layout.S / kernel.channels if kernel.channels else scale
                    placed = replace(kernel, channels=layout.S) if kernel.channels else kernel
                    streams = self.batch * self.heads
                    totals[backward] += placed.time(gpu, streams, self.time, self.channels, wide)
        return totals[False], totals[True]

    def _layout(self, limits: Accesses) -> tuple[Layout, str]:
        sizes = self.writes, self.reads, self.channels, limits, self.batch * self.heads
        return Layout.for_streams(*sizes), Layout.name(*sizes)
