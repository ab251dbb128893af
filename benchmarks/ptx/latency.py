"""A model of how long a block takes, from the instructions that it executes and the latencies of a GPU.

**A model, not a measurement**: its constants are published latencies, and none of them was fitted to a run of these
kernels. It gives a range. In both ends a result is ready when its instruction started and its latency has passed, each
instruction of a warp takes an issue slot of its scheduler, and barriers and branches are not crossed.

- `reordered`: between barriers an instruction starts as soon as its operands are ready, as if the assembler found the
  best order.
- `in_order`: an instruction starts after the one before it in the PTX.

Warps of a block go in step. Blocks that share a multiprocessor overlap their waiting, and share issue slots, the path
to the L2 cache and the bandwidth of memory.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from benchmarks.ptx.machine import Block
from benchmarks.ptx.memory import Array, Buffer
from benchmarks.ptx.program import Instruction

from sdm.ops.triton.ahead_of_time import Resources

SECTOR = 32  # bytes
SCHEDULERS = 4  # of a multiprocessor
ISSUE = 1.1  # slots of a PTX instruction: the assembler makes a few more
BRANCH = 12  # cycles


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

    def resident(self, threads: int, taken: Resources) -> int:
        """How many blocks share a multiprocessor."""
        registers = -(-taken.registers // 8) * 8 * threads
        limits = [self.registers // registers, self.warps // -(-threads // 32), 32]
        limits.append(self.shared // max(taken.shared + 1024, 1))
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
    reordered: float = 0.0
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


@dataclass
class Schedule:
    """Observes a block and adds up its usage.

    A sector of memory counts as being in the L2 cache if the block touched it less than `reach` bytes ago, which is the
    block's part of the cache, or if it belongs to one of the `common` buffers, which many blocks read at about the same
    time.
    """

    gpu: GPU
    reach: float
    common: frozenset[str] = frozenset()
    usage: Usage = field(default_factory=Usage)
    stretches: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Cycles of the reordered end, by the source line of the barrier or branch that ended a stretch of instructions."""
    waits: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Cycles that the in-order end waits, by source line."""
    _ready: dict[str, tuple[float, float]] = field(default_factory=dict)
    _segment: float = 0.0  # where the current stretch between barriers began, reordered
    _issued: float = 0.0  # in it
    _latest: float = 0.0  # start of its last instruction
    _path: tuple[float, float] = (0.0, 0.0)  # when the path to the L2 cache is free
    _touched: dict[int, Array] = field(default_factory=dict)
    _moved: float = 0.0

    def __call__(self, instruction: Instruction, block: Block, mask: Array | None, addresses: Array | None) -> None:
        gpu, usage = self.gpu, self.usage
        slots = block.count / 32 / SCHEDULERS * ISSUE
        issue = max(slots, ISSUE)  # a warp alone does not fill the slots of all schedulers
        needed = [self._ready[x] for x in instruction.read if x in self._ready]
        free, ordered = (max(times) for times in zip(*needed, strict=True)) if needed else (0.0, 0.0)
        if ordered > usage.in_order:
            self.waits[instruction.source] += ordered - usage.in_order
            usage.in_order = ordered
        start = max(self._segment, free)
        began = usage.in_order
        usage.issue += slots
        self._issued += issue
        usage.in_order += issue
        latency = delay = gpu.arithmetic
        if instruction.is_block_barrier or instruction.opcode == "bra":
            cost = gpu.barrier if instruction.is_block_barrier else BRANCH
            usage.barriers += instruction.is_block_barrier
            usage.in_order += cost
            begun = self._segment
            self._segment = max(begun + self._issued, self._latest, start) + cost
            self.stretches[instruction.source] += self._segment - begun
            self._latest, self._issued = self._segment, 0.0
            usage.reordered = self._segment
            return
        if addresses is not None:
            size, missed = self._transactions(instruction, block, mask, addresses)
            cycles = max(size / gpu.fill, block.count / 32)
            usage.path += cycles
            usage.memory += missed
            self._path = max(start, self._path[0]) + cycles, max(began, self._path[1]) + cycles
            if instruction.opcode == "ld":
                far = gpu.memory_latency if missed else gpu.l2_latency
                latency, delay = self._path[0] - start + far, self._path[1] - began + far
        elif instruction.opcode in ("ld", "ldmatrix") and "param" not in instruction.parts:
            latency = delay = gpu.shared_latency
        elif instruction.opcode in ("shfl", "redux"):
            latency = delay = gpu.shuffle
        self._latest = max(self._latest, start)
        for register in instruction.written:
            self._ready[register] = start + latency, began + delay
        usage.reordered = max(self._segment + self._issued, self._latest)

    def _transactions(
        self, instruction: Instruction, block: Block, mask: Array | None, addresses: Array
    ) -> tuple[float, float]:
        """Bytes over the path to the L2 cache, and those that the cache does not hold."""
        lanes = np.arange(block.count) if mask is None else np.nonzero(mask)[0]
        vector = next((int(x[1:]) for x in instruction.parts if x in ("v2", "v4")), 1)
        width = vector * int(instruction.parts[-1][1:]) // 8
        sectors = np.concatenate([addresses // SECTOR, (addresses + np.uint64(width - 1)) // SECTOR])
        by_warp = np.unique(np.concatenate([lanes // 32] * 2).astype(np.uint64) << np.uint64(58) | sectors)
        size = SECTOR * len(by_warp)
        missed = 0.0
        for buffer, _, offset in block.memory.split(addresses, instruction.source):
            if buffer.name in self.common:
                continue
            sector = np.unique((offset + buffer.start) // SECTOR)
            last = self._last_touch(buffer)
            missed += SECTOR * int((self._moved - last[sector] > self.reach).sum())
            last[sector] = self._moved
        self._moved += size
        return size, missed

    def _last_touch(self, buffer: Buffer) -> Array:
        if id(buffer.data) not in self._touched:
            sectors = (len(buffer.data) + buffer.start) // SECTOR + 1
            self._touched[id(buffer.data)] = np.full(sectors, -np.inf)
        return self._touched[id(buffer.data)]


@dataclass(frozen=True)
class Estimate:
    """Seconds of a launch: a range."""

    low: float
    high: float
    bandwidth: float
    """Seconds that memory needs for the launch's bytes."""

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.low + other.low, self.high + other.high, self.bandwidth + other.bandwidth)


def estimate(gpu: GPU, usage: Usage, blocks: int, threads: int, taken: Resources) -> Estimate:
    """How long a launch of equal blocks takes.

    Multiprocessors take blocks in turns of as many as fit. Those of a turn overlap their waiting; a turn takes as long
    as a block alone, or as the issue slots and the path to the L2 cache need for all of them. No launch is faster than
    memory.
    """
    fit = gpu.resident(threads, taken)
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
