"""Runs a compiled kernel, block after block: all threads of a block take each instruction together.

Threads that take different branches wait for each other where they meet again: those with the lowest program counter go
first. Instructions that work across threads must not be met in between, and raise if they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from benchmarks.ptx import arithmetic
from benchmarks.ptx.memory import Array, Buffer, Fault, Memory, Races
from benchmarks.ptx.program import Instruction, Program
from numpy.typing import NDArray

_ADDRESS = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]")
_TOGETHER = ("ret", "bar", "barrier", "shfl", "redux", "ldmatrix", "stmatrix")

Observer = Callable[[Instruction, "Block", "Array | None", "Array | None"], None]
"""Told of each instruction before it is executed: the instruction, the block, the mask of active threads (None: all),
and for global memory the addresses of the active threads."""


class Block:
    """A block of threads with its registers and shared memory.

    Args:
        program: the compiled kernel.
        memory: global memory.
        parameters: the kernel's parameters, addresses and integers, in order.
        number: which block of the grid it is.
        shared: bytes of shared memory.
        races: where races are counted; None leaves them unchecked.
        moment: a number larger than all moments of earlier blocks; `launch` is that of the launch's first block.
        observer: told of each instruction.
    """

    def __init__(
        self,
        program: Program,
        memory: Memory,
        parameters: list[int],
        number: int,
        shared: int,
        races: Races | None = None,
        moment: int = 0,
        launch: int = 0,
        observer: Observer | None = None,
    ) -> None:
        self.program, self.memory, self.block = program, memory, number
        self.count = program.threads
        self.registers: dict[str, Array] = {}
        self.parameters = dict(zip(program.parameters, parameters, strict=False))
        self.warp = (np.arange(self.count) // arithmetic.WARP).astype(np.int16)
        narrow = _narrowest_shared(program)
        self.shared = Buffer(np.zeros(-(-shared // 16) * 16 + 16, np.uint8), "shared memory", narrow)
        self.races, self.observer = races, observer
        self.moment, self.begun, self.launch = moment, moment, launch
        self.barriers = self.executed = 0
        self._decoded: list[Callable[[Block, Array | None], None]] = _decoded(program)

    def run(self) -> Block:
        """Execute the block to its end."""
        code, steps, at = self.program.instructions, self._decoded, 0
        with np.errstate(all="ignore"):
            while True:
                instruction = code[at]
                self.executed += 1
                mask = self._mask(instruction)
                taken = mask is None or mask.any()
                if instruction.opcode == "bra":
                    if self.observer:
                        self.observer(instruction, self, mask, None)
                    if mask is None:
                        at = self._target(instruction)
                    else:
                        at = self._diverge(at, mask) if taken else at + 1
                    continue
                if instruction.opcode == "ret" and taken:
                    if mask is not None:
                        raise Fault(f"some threads return before others: {instruction}")
                    return self
                if taken:
                    steps[at](self, mask)
                at += 1

    def _mask(self, instruction: Instruction) -> Array | None:
        """The threads that execute it, None: all."""
        if not instruction.guard:
            return None
        guard = self.registers[instruction.guard]
        mask = ~guard if instruction.negated else guard
        return None if mask.all() else mask

    def _target(self, instruction: Instruction) -> int:
        return self.program.labels[instruction.operands[0]]

    def _diverge(self, at: int, mask: Array) -> int:
        """From a branch that some threads take to where all threads are together again."""
        code = self.program.instructions
        where = np.where(mask, self._target(code[at]), at + 1)
        while True:
            lowest = int(where.min())
            active = where == lowest
            if active.all():
                return lowest
            instruction = code[lowest]
            if instruction.opcode in _TOGETHER and "warp" not in instruction.parts:
                raise Fault(f"threads have taken different branches before {instruction}")
            self.executed += 1
            guard = self._mask(instruction)
            mask = active if guard is None else active & guard
            where[active] = lowest + 1
            if instruction.opcode == "bra":
                where[mask] = self._target(instruction)
            elif mask.any():
                self._decoded[lowest](self, mask)

    def wait_for_all(self) -> None:
        """What comes after a barrier does not race with what came before."""
        self.moment += 1
        self.barriers += 1

    def load(
        self, buffer: Buffer, offset: NDArray[np.int64], lanes: Array, size: int, count: int, what: str
    ) -> list[Array]:
        """`count` numbers of `size` bytes for each of the lanes."""
        total = size * count
        buffer.check_bounds(offset, total, what)
        if self.races is not None:
            cells, warp = buffer.cells(offset, total, self.warp[lanes])
            buffer.note_read(cells, warp, self.moment, self.begun, self.launch, self.races, what)
        at = offset // size
        view = buffer.view(size)
        return [view[at + place] for place in range(count)]

    def store(self, buffer: Buffer, offset: NDArray[np.int64], lanes: Array, values: list[Array], what: str) -> None:
        """One or more numbers of each of the lanes."""
        size, count = values[0].dtype.itemsize, len(values)
        buffer.check_bounds(offset, size * count, what)
        at, view = offset // size, buffer.view(size)
        for place, value in enumerate(values):
            view[at + place] = value
        if self.races is not None:
            same = np.ones(len(at), bool)
            for place, value in enumerate(values):
                same &= view[at + place] == value
            cells, warp = buffer.cells(offset, size * count, self.warp[lanes])
            same = np.repeat(same, len(cells) // len(same))
            buffer.note_write(cells, warp, same, self.moment, self.begun, self.launch, self.races, what)


_cache: dict[int, tuple[Program, list[Callable[[Block, Array | None], None]]]] = {}


def _decoded(program: Program) -> list[Callable[[Block, Array | None], None]]:
    """The functions of a program's instructions, decoded once."""
    known = _cache.get(id(program))
    if known is None or known[0] is not program:
        known = program, [_observed(x, _decode(x)) for x in program.instructions]
        _cache[id(program)] = known
    return known[1]


def _narrowest_shared(program: Program) -> int:
    sizes = [
        arithmetic.kind_of(x.parts[-1])[1] // 8
        for x in program.instructions
        if x.opcode in ("ld", "st") and "shared" in x.parts
    ]
    return min([4, *sizes])


def _observed(
    instruction: Instruction, execute: Callable[[Block, Array | None], None]
) -> Callable[[Block, Array | None], None]:
    if instruction.opcode in ("ld", "st") and "global" in instruction.parts:
        return execute  # tells the observer itself, with addresses

    def run(block: Block, mask: Array | None) -> None:
        if block.observer:
            block.observer(instruction, block, mask, None)
        execute(block, mask)

    return run


def _decode(instruction: Instruction) -> Callable[[Block, Array | None], None]:
    if instruction.opcode in ("ld", "st") and "param" not in instruction.parts:
        return _global(instruction) if "global" in instruction.parts else _shared(instruction)
    if instruction.opcode in ("ldmatrix", "stmatrix"):
        return _matrix(instruction)
    if instruction.is_block_barrier:
        if instruction.operands not in (("0",), ()):
            raise Fault(f"only barriers of the whole block are known, got {instruction}")
        return lambda block, mask: block.wait_for_all()
    if instruction.opcode in ("bra", "ret", "bar", "barrier"):
        return lambda block, mask: None
    return arithmetic.decode(instruction)


def _address(operand: str) -> arithmetic.Read:
    match = _ADDRESS.fullmatch(operand)
    if match is None:
        raise Fault(f"unknown address {operand}")
    bits = arithmetic.width(match[1]) if match[1].startswith("%") else 32
    read, offset = arithmetic.reader(match[1], f"u{bits}"), int(match[2] or "0", 0)
    constant = np.array(offset & ((1 << bits) - 1), f"u{bits // 8}")[()]
    return lambda block: np.broadcast_to(read(block) + constant, block.count).astype(np.uint64)


def _names(operand: str) -> list[str]:
    return [x.strip() for x in operand.strip("{} ").split(",")]


def _global(instruction: Instruction) -> Callable[[Block, Array | None], None]:
    load = instruction.opcode == "ld"
    target, source = instruction.operands
    address = _address(source if load else target)
    suffix, names, what = instruction.parts[-1], _names(target if load else source), instruction.source
    size = arithmetic.kind_of(suffix)[1] // 8
    writes = [arithmetic.writer(name) for name in names] if load else []
    reads = [] if load else [arithmetic.reader(name, f"b{8 * size}") for name in names]

    def execute(block: Block, mask: Array | None) -> None:
        lanes = np.arange(block.count) if mask is None else np.nonzero(mask)[0]
        addresses = address(block)[lanes]
        if block.observer:
            block.observer(instruction, block, mask, addresses)
        parts = block.memory.split(addresses, what)
        if load:
            results = np.zeros((len(names), block.count), f"u{size}")
            for buffer, position, offset in parts:
                loaded = block.load(buffer, offset, lanes[position], size, len(names), what)
                results[:, lanes[position]] = loaded
            for write, result in zip(writes, results, strict=True):
                write(block, result.view(f"i{size}") if suffix[0] == "s" else result, mask)
            return
        values = [np.broadcast_to(read(block), block.count) for read in reads]
        for buffer, position, offset in parts:
            block.store(buffer, offset, lanes[position], [value[lanes[position]] for value in values], what)

    return execute


def _shared(instruction: Instruction) -> Callable[[Block, Array | None], None]:
    load = instruction.opcode == "ld"
    target, source = instruction.operands
    address = _address(source if load else target)
    suffix, names, what = instruction.parts[-1], _names(target if load else source), instruction.source
    size = arithmetic.kind_of(suffix)[1] // 8
    writes = [arithmetic.writer(name) for name in names] if load else []
    reads = [] if load else [arithmetic.reader(name, f"b{8 * size}") for name in names]

    def execute(block: Block, mask: Array | None) -> None:
        lanes = np.arange(block.count) if mask is None else np.nonzero(mask)[0]
        offset = address(block)[lanes].astype(np.int64)
        if load:
            results = np.zeros((len(names), block.count), f"u{size}")
            results[:, lanes] = block.load(block.shared, offset, lanes, size, len(names), what)
            for write, result in zip(writes, results, strict=True):
                write(block, result.view(f"i{size}") if suffix[0] == "s" else result, mask)
            return
        values = [np.broadcast_to(read(block), block.count)[lanes] for read in reads]
        block.store(block.shared, offset, lanes, values, what)

    return execute


def _matrix(instruction: Instruction) -> Callable[[Block, Array | None], None]:
    """8x8 matrices of 16-bit numbers: lane l holds two neighbours of row l // 4, of which lane 8 m + l // 4 has the
    address."""
    if "trans" in instruction.parts:
        raise Fault(f"unknown instruction {instruction}")
    load, what = instruction.opcode == "ldmatrix", instruction.source
    address = _address(instruction.operands[1 if load else 0])
    names = _names(instruction.operands[0 if load else 1])
    writes = [arithmetic.writer(name) for name in names] if load else []
    reads = [] if load else [arithmetic.reader(name, "b32") for name in names]
    lane = np.arange(arithmetic.WARP)

    def execute(block: Block, mask: Array | None) -> None:
        rows, everybody = address(block).astype(np.int64).reshape(-1, arithmetic.WARP), np.arange(block.count)
        for matrix in range(len(names)):
            offset = (rows[:, 8 * matrix + lane // 4] + lane % 4 * 4).reshape(-1)
            if load:
                (value,) = block.load(block.shared, offset, everybody, 4, 1, what)
                writes[matrix](block, value, mask)
            else:
                block.store(block.shared, offset, everybody, [reads[matrix](block)], what)

    return execute
