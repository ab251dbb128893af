"""A model of how long a block takes, from the instructions that it executes and the latencies of a GPU.

**A model, not a measurement**: its constants are published latencies, and none of them was fitted to a run of these
kernels. It gives a range. In both ends a result is ready when its instruction started and its latency has passed, each
instruction of a warp takes an issue slot of its scheduler, and barriers and branches are not crossed.

- `reordered`: between barriers an instruction starts as soon as its operands are ready, as if the assembler found the
  best order.
- `in_order`: an instruction starts after the one before it in the PTX.

Warps of a block go in step. `sdm.plan.kernel_time` has what follows for a launch: blocks that share a multiprocessor
overlap their waiting, and share issue slots, the path to the L2 cache and the bandwidth of memory.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from benchmarks.ptx.machine import Block
from benchmarks.ptx.memory import Array, Buffer
from benchmarks.ptx.program import Instruction

from sdm.plan.kernel_time import GPU, Usage

SECTOR = 32  # bytes
SCHEDULERS = 4  # of a multiprocessor
ISSUE = 1.1  # slots of a PTX instruction: the assembler makes a few more
BRANCH = 12  # cycles


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
