"""What PTX instructions do to registers, for all threads of a block at once.

`decode` turns an instruction into a function of the block and of the mask of its active threads (None: all). Registers
hold unsigned bits; an instruction says how it reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from benchmarks.ptx.memory import Array, Fault
from benchmarks.ptx.program import Instruction

WARP = 32


class Threads(Protocol):
    """The threads of a block, as far as arithmetic is concerned."""

    count: int
    block: int
    registers: dict[str, Array]
    parameters: dict[str, int]


Read = Callable[[Threads], Any]
Write = Callable[[Threads, Any, "Array | None"], None]
Execute = Callable[[Threads, "Array | None"], None]


def width(register: str) -> int:
    """Bits of a register, by its name."""
    for prefix, bits in (("%rd", 64), ("%fd", 64), ("%rs", 16), ("%h", 16)):
        if register.startswith(prefix):
            return bits
    return 32


def kind_of(suffix: str) -> tuple[str, int]:
    """Of a type such as `s32`: "i", "u", "f" or "bf" (bfloat16), and its bits."""
    if suffix == "bf16":
        return "bf", 16
    letter = {"s": "i", "u": "u", "b": "u", "f": "f"}.get(suffix[0])
    if letter is None:
        raise Fault(f"unknown type {suffix}")
    return letter, int(suffix[1:])


def reader(operand: str, suffix: str) -> Read:
    """A function that reads the operand as numbers of a type."""
    if suffix == "pred":
        if operand.startswith("!"):
            return lambda threads: ~threads.registers[operand[1:]]
        if operand.startswith("%"):
            return lambda threads: threads.registers[operand]
        return lambda threads: np.full(threads.count, int(operand, 0) != 0)
    kind, bits = kind_of(suffix)
    raw = np.dtype(f"u{bits // 8}")
    if kind == "bf":
        bits_of = reader(operand, "u16")
        return lambda threads: (np.atleast_1d(bits_of(threads)).astype(np.uint32) << np.uint32(16)).view(np.float32)
    dtype = np.dtype(f"{kind}{bits // 8}")
    if operand == "%tid.x":
        return lambda threads: np.arange(threads.count, dtype=raw).view(dtype)
    if operand.startswith("%ctaid"):
        axis = "xyz".index(operand[-1])
        return lambda threads: raw.type(threads.block if axis == 0 else 0).view(dtype)
    if operand.startswith("%"):
        if width(operand) == bits:
            return lambda threads: threads.registers[operand].view(dtype)
        return lambda threads: threads.registers[operand].astype(raw).view(dtype)
    if operand == "global_smem":
        number = 0
    elif operand[:2] in ("0f", "0F", "0d", "0D"):
        number = int(operand[2:], 16)
    else:
        number = int(operand.rstrip("U"), 0) & ((1 << bits) - 1)
    constant = np.array(number, raw).view(dtype)[()]
    return lambda threads: constant


def writer(operand: str) -> Write:
    """A function that writes numbers of any type into the active threads' register."""
    if operand == "_":
        return lambda threads, value, mask: None
    if operand.startswith("%p"):
        size, raw, signed = 1, np.dtype(bool), np.dtype(bool)
    else:
        size = width(operand) // 8
        raw, signed = np.dtype(f"u{size}"), np.dtype(f"i{size}")

    def write(threads: Threads, value: Any, mask: Array | None) -> None:
        value = np.asarray(value)
        if value.dtype.itemsize != size:
            value = value.astype(signed if value.dtype.kind == "i" else raw)
        value = value.view(raw)
        if mask is not None:
            before = threads.registers.get(operand)
            value = np.where(mask, value, raw.type(0) if before is None else before)
        elif value.shape != (threads.count,):
            value = np.full(threads.count, value, raw)
        threads.registers[operand] = value

    return write


def to_bfloat16(x: Array) -> Array:
    """Bits of float32 numbers, rounded to the nearest bfloat16 (even on ties)."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _compare(name: str, x: Any, y: Any) -> Any:
    """Comparisons. Those that end with u are true if a number is NaN; the others, `ne` too, are false."""
    name = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(name, name)
    if name in ("nan", "num"):
        unordered = np.isnan(x) | np.isnan(y)
        return unordered if name == "nan" else ~unordered
    operator = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
    operator |= {"gt": np.greater, "ge": np.greater_equal}
    result = operator[name[:2]](x, y)
    if np.asarray(x).dtype.kind == "f" and name in ("ne", "equ", "ltu", "leu", "gtu", "geu"):
        unordered = np.isnan(x) | np.isnan(y)
        return result & ~unordered if name == "ne" else result | unordered
    return result


def _combine(name: str, x: Any, y: Any) -> Any:
    return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name](x, y)


def _divide(x: Array, y: Array) -> Array:
    """Towards zero, as C does."""
    if x.dtype.kind == "f":
        return x / y
    sign = np.sign(x).astype(np.int64) * np.sign(y).astype(np.int64) if x.dtype.kind == "i" else 1
    divisor = np.where(np.asarray(y) == 0, 1, y)
    return (sign * (np.abs(x.astype(np.int64)) // np.abs(divisor.astype(np.int64)))).astype(x.dtype)


def _high(x: Array, y: Array) -> Array:
    """The upper half of a product of 32 bits."""
    wide = np.int64 if x.dtype.kind == "i" else np.uint64
    return ((x.astype(wide) * np.asarray(y).astype(wide)) >> wide(32)).astype(x.dtype)


_FLOAT_MINMAX = {"min": np.fmin, "max": np.fmax}
_SIMPLE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "abs": np.abs,
    "neg": np.negative,
    "div": lambda x, y: _divide(np.asarray(x), y),
    "rem": lambda x, y: np.fmod(x, np.where(np.asarray(y) == 0, 1, y).astype(np.asarray(y).dtype)),
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: np.float32(1) / x,
    "sqrt": np.sqrt,
    "mad": lambda x, y, z: x * y + z,
    # One rounding: the product of two float32 numbers is exact in float64.
    "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32),
}


def decode(instruction: Instruction) -> Execute:
    """The function that executes an instruction which touches registers only."""
    opcode, parts, operands = instruction.opcode, instruction.parts, instruction.operands
    special = _SPECIAL.get(opcode)
    if special is not None:
        return special(instruction)
    suffix = parts[-1]
    write = writer(operands[0])
    if re.fullmatch(r"[su]16x2", suffix):
        return _pairs(instruction)
    reads = [reader(operand, suffix) for operand in operands[1:]]
    function = _SIMPLE.get(opcode)
    if function is None:
        raise Fault(f"unknown instruction {instruction}")
    if suffix == "pred" and opcode == "not":
        function = np.logical_not
    if opcode in ("mul", "mad") and "hi" in parts:
        function = _high
    elif opcode in _FLOAT_MINMAX and suffix[0] == "f":
        function = _FLOAT_MINMAX[opcode]
    elif opcode in ("mul", "mad") and "wide" in parts:
        kind, bits = kind_of(suffix)
        wide = np.dtype(f"{kind}{bits // 4}")
        last = reader(operands[3], f"{'s' if kind == 'i' else 'u'}{2 * bits}") if opcode == "mad" else None

        def multiply(threads: Threads, mask: Array | None) -> None:
            product = np.asarray(reads[0](threads)).astype(wide) * np.asarray(reads[1](threads)).astype(wide)
            write(threads, product if last is None else product + last(threads), mask)

        return multiply
    return lambda threads, mask: write(threads, function(*[read(threads) for read in reads]), mask)


def _pairs(instruction: Instruction) -> Execute:
    """Two numbers of 16 bits at once."""
    opcode, parts, operands = instruction.opcode, instruction.parts, instruction.operands
    half = np.dtype("i2" if parts[-1][0] == "s" else "u2")
    reads, write, function = [reader(x, "u32") for x in operands[1:]], writer(operands[0]), _SIMPLE[opcode]

    def execute(threads: Threads, mask: Array | None) -> None:
        halves = [np.broadcast_to(read(threads), threads.count).copy().view(half) for read in reads]
        write(threads, function(*halves).view(np.uint32), mask)

    return execute


def _mov(instruction: Instruction) -> Execute:
    target, source = instruction.operands
    if target.startswith("{"):  # a register into its parts
        writes = [writer(x.strip()) for x in target.strip("{}").split(",")]
        names = [x.strip() for x in target.strip("{}").split(",") if x.strip() != "_"]
        part = width(names[0])
        read = reader(source, f"b{part * len(writes)}")

        def unpack(threads: Threads, mask: Array | None) -> None:
            bits = np.broadcast_to(read(threads), threads.count)
            for place, write in enumerate(writes):
                write(threads, (bits >> bits.dtype.type(part * place)).astype(f"u{part // 8}"), mask)

        return unpack
    write = writer(target)
    if source.startswith("{"):
        names = [x.strip() for x in source.strip("{}").split(",")]
        bits = width(target)
        part, dtype = bits // len(names), np.dtype(f"u{bits // 8}")
        reads = [reader(name, f"b{part}") for name in names]

        def pack(threads: Threads, mask: Array | None) -> None:
            total = dtype.type(0)
            for place, read in enumerate(reads):
                total = total | (np.asarray(read(threads)).astype(dtype) << dtype.type(part * place))
            write(threads, total, mask)

        return pack
    read = reader(source, "pred" if target.startswith("%p") else f"b{width(target)}")
    return lambda threads, mask: write(threads, read(threads), mask)


def _setp(instruction: Instruction) -> Execute:
    parts, operands = instruction.parts, instruction.operands
    reads, write = [reader(x, parts[-1]) for x in operands[1:3]], writer(operands[0])
    third = reader(operands[3], "pred") if len(operands) > 3 else None

    def execute(threads: Threads, mask: Array | None) -> None:
        result = _compare(parts[1], reads[0](threads), reads[1](threads))
        write(threads, result if third is None else _combine(parts[2], result, third(threads)), mask)

    return execute


def _selp(instruction: Instruction) -> Execute:
    first, second = (reader(x, instruction.parts[-1]) for x in instruction.operands[1:3])
    chosen, write = reader(instruction.operands[3], "pred"), writer(instruction.operands[0])
    return lambda threads, mask: write(threads, np.where(chosen(threads), first(threads), second(threads)), mask)


def _cvt(instruction: Instruction) -> Execute:
    parts, operands = instruction.parts, instruction.operands
    target, source = parts[-2], parts[-1]
    write, reads = writer(operands[0]), [reader(x, source) for x in operands[1:]]
    if target == "bf16x2":

        def two(threads: Threads, mask: Array | None) -> None:
            high, low = (to_bfloat16(np.broadcast_to(read(threads), threads.count)) for read in reads)
            write(threads, (high.astype(np.uint32) << np.uint32(16)) | low, mask)

        return two
    if target == "bf16":
        return lambda threads, mask: write(threads, to_bfloat16(np.atleast_1d(reads[0](threads))), mask)
    if target not in {f"{letter}{bits}" for letter in "suf" for bits in (8, 16, 32, 64)}:
        raise Fault(f"unknown conversion {instruction}")
    kind, bits = kind_of(target)
    dtype = np.dtype(f"{kind}{bits // 8}")
    rounding = next((f for name, f in _ROUNDING.items() if name in parts), np.trunc)

    def execute(threads: Threads, mask: Array | None) -> None:
        x = np.asarray(reads[0](threads))
        if kind != "f" and x.dtype.kind == "f":
            x = rounding(x).astype(np.int64)
        write(threads, x.astype(dtype), mask)

    return execute


_ROUNDING = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


def _shift(instruction: Instruction) -> Execute:
    kind, bits = kind_of(instruction.parts[-1])
    read, by = reader(instruction.operands[1], instruction.parts[-1]), reader(instruction.operands[2], "u32")
    write, left = writer(instruction.operands[0]), instruction.opcode == "shl"
    dtype = np.dtype(f"{kind}{bits // 8}")

    def execute(threads: Threads, mask: Array | None) -> None:
        distance = np.asarray(by(threads))
        bounded = np.minimum(distance, bits - 1).astype(dtype)
        x = read(threads)
        shifted = x << bounded if left else x >> bounded
        if left or kind == "u":
            shifted = np.where(distance >= bits, dtype.type(0), shifted)
        write(threads, shifted, mask)

    return execute


def _bfe(instruction: Instruction) -> Execute:
    kind, bits = kind_of(instruction.parts[-1])
    read = reader(instruction.operands[1], instruction.parts[-1])
    start, length = (reader(x, "u32") for x in instruction.operands[2:4])
    write, dtype = writer(instruction.operands[0]), np.dtype(f"{kind}{bits // 8}")

    def execute(threads: Threads, mask: Array | None) -> None:
        x = np.asarray(read(threads)).astype(np.int64)
        size = np.asarray(length(threads)).astype(np.int64)
        field = (x >> np.asarray(start(threads)).astype(np.int64)) & ((np.int64(1) << size) - 1)
        if kind == "i":
            field = np.where((field >> (size - 1)) & 1, field - (np.int64(1) << size), field)
        write(threads, field.astype(dtype), mask)

    return execute


def _prmt(instruction: Instruction) -> Execute:
    low, high, selector = (reader(x, "u32") for x in instruction.operands[1:4])
    write = writer(instruction.operands[0])

    def execute(threads: Threads, mask: Array | None) -> None:
        both = np.broadcast_to(high(threads), threads.count).astype(np.uint64) << np.uint64(32)
        both = both | np.asarray(low(threads)).astype(np.uint64)
        choice, result = np.asarray(selector(threads)), np.zeros(threads.count, np.uint32)
        for place in range(4):
            nibble = (choice >> np.uint32(4 * place)) & np.uint32(15)
            byte = (both >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
            byte = np.where(nibble & np.uint32(8), sign, byte).astype(np.uint32)
            result |= byte << np.uint32(8 * place)
        write(threads, result, mask)

    return execute


def _lop3(instruction: Instruction) -> Execute:
    reads, write = [reader(x, "u32") for x in instruction.operands[1:4]], writer(instruction.operands[0])
    table = int(instruction.operands[4].rstrip("U"), 0)

    def execute(threads: Threads, mask: Array | None) -> None:
        x, y, z = (read(threads) for read in reads)
        total = np.uint32(0)
        for case in range(8):
            if table >> case & 1:
                total = total | (x if case & 4 else ~x) & (y if case & 2 else ~y) & (z if case & 1 else ~z)
        write(threads, total, mask)

    return execute


def _shfl(instruction: Instruction) -> Execute:
    """Values from other lanes of the warp."""
    mode, operands = instruction.parts[2], instruction.operands
    target, _, flag = operands[0].partition("|")
    value, lane, bounds = reader(operands[1], "b32"), reader(operands[2], "s32"), reader(operands[3], "u32")
    write, write_flag = writer(target), writer(flag or "_")
    own = np.arange(WARP)[None, :]

    def rows(threads: Threads, read: Read) -> Array:
        return np.broadcast_to(read(threads), threads.count).reshape(-1, WARP)

    def execute(threads: Threads, mask: Array | None) -> None:
        by, limits = rows(threads, lane).astype(np.int64), rows(threads, bounds).astype(np.int64)
        segment, clamp = (limits >> 8) & 31, limits & 31
        lowest, highest = own & segment, (own & segment) | (clamp & ~segment)
        other = {
            "bfly": lambda: own ^ by,
            "up": lambda: own - by,
            "down": lambda: own + by,
            "idx": lambda: lowest | (by & ~segment),
        }[mode]()
        inside = other >= lowest if mode == "up" else other <= highest
        moved = np.take_along_axis(rows(threads, value), np.where(inside, other, own), 1)
        write(threads, moved.reshape(-1), mask)
        write_flag(threads, inside.reshape(-1), mask)

    return execute


def _redux(instruction: Instruction) -> Execute:
    read, write = reader(instruction.operands[1], instruction.parts[-1]), writer(instruction.operands[0])
    function = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and}
    reduce = function[instruction.parts[2]].reduce

    def execute(threads: Threads, mask: Array | None) -> None:
        x = np.broadcast_to(read(threads), threads.count).reshape(-1, WARP)
        write(threads, np.repeat(reduce(x, axis=1, dtype=x.dtype), WARP), mask)

    return execute


def _cvta(instruction: Instruction) -> Execute:
    read, write = reader(instruction.operands[1], "u64"), writer(instruction.operands[0])
    return lambda threads, mask: write(threads, read(threads), mask)


def _load_parameter(instruction: Instruction) -> Execute:
    name, write = instruction.operands[1].strip("[]"), writer(instruction.operands[0])
    kind, bits = kind_of(instruction.parts[-1])
    raw, dtype = np.dtype(f"u{bits // 8}"), np.dtype(f"{kind}{bits // 8}")

    def execute(threads: Threads, mask: Array | None) -> None:
        write(threads, np.array(threads.parameters[name] & ((1 << bits) - 1), raw).view(dtype)[()], mask)

    return execute


_SPECIAL: dict[str, Callable[[Instruction], Execute]] = {
    "mov": _mov,
    "setp": _setp,
    "selp": _selp,
    "cvt": _cvt,
    "cvta": _cvta,
    "shl": _shift,
    "shr": _shift,
    "bfe": _bfe,
    "prmt": _prmt,
    "lop3": _lop3,
    "shfl": _shfl,
    "redux": _redux,
    "ld": _load_parameter,
}
