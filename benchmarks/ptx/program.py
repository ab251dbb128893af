"""PTX text, parsed into instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)\s*\n(.*?)\{", re.DOTALL)
_FILE = re.compile(r'\.file\s+(\d+)\s+((?:"[^"]*"\s*)+)')
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_LABEL = re.compile(r"(\$?[\w$]+):\s*(.*)")
_GUARD = re.compile(r"@(!?)(%p\w*)\s+(.*)")
_REGISTER = re.compile(r"%[a-z]+\d+")


@dataclass(frozen=True)
class Instruction:
    """A PTX instruction with the line of the Triton source that it was compiled from."""

    parts: tuple[str, ...]
    """The opcode and its modifiers: `ld.global.v4.b32` is ("ld", "global", "v4", "b32")."""
    operands: tuple[str, ...]
    guard: str = ""
    """The predicate register that decides which threads execute the instruction."""
    negated: bool = False
    source: str = ""
    """File and line, for example `forward.py:94`."""

    @property
    def opcode(self) -> str:
        return self.parts[0]

    @property
    def is_block_barrier(self) -> bool:
        """Whether all warps of the block wait for each other here."""
        return self.opcode in ("bar", "barrier") and "warp" not in self.parts

    @property
    def written(self) -> tuple[str, ...]:
        """Registers that the instruction writes."""
        if self.opcode in ("st", "stmatrix", "bar", "bra", "ret"):
            return ()
        return tuple(_REGISTER.findall(self.operands[0])) if self.operands else ()

    @property
    def read(self) -> tuple[str, ...]:
        """Registers that the instruction reads."""
        operands = self.operands if self.opcode in ("st", "stmatrix") else self.operands[1:]
        registers = [register for operand in operands for register in _REGISTER.findall(operand)]
        return (*registers, self.guard) if self.guard else tuple(registers)

    def __str__(self) -> str:
        guard = f"@{'!' if self.negated else ''}{self.guard} " if self.guard else ""
        return f"{guard}{'.'.join(self.parts)} {', '.join(self.operands)} ({self.source})"


@dataclass(frozen=True)
class Program:
    """The compiled kernel."""

    name: str
    parameters: tuple[str, ...]
    threads: int
    """Threads of a block."""
    instructions: tuple[Instruction, ...]
    labels: dict[str, int] = field(hash=False)

    def barriers(self) -> list[str]:
        """Source lines of the block-wide barriers, without repetition."""
        return list(dict.fromkeys(x.source for x in self.instructions if x.is_block_barrier))

    def without_barriers(self, source: str) -> Program:
        """The same program, in which the barriers of one source line do nothing."""
        idle = Instruction(("bar", "warp", "sync"), ("-1",), source=source)
        changed = tuple(idle if x.is_block_barrier and x.source == source else x for x in self.instructions)
        return replace(self, instructions=changed)


def parse(text: str) -> Program:
    """Parse the PTX of a kernel, which is the only function of its module."""
    entry = _ENTRY.search(text)
    if entry is None:
        raise ValueError("the PTX has no .visible .entry: only kernels that Triton compiled can be parsed")
    threads = re.search(r"\.reqntid (\d+)", entry[3])
    if threads is None:
        raise ValueError(f"{entry[1]} does not say how many threads a block has (.reqntid)")
    files = {int(m[1]): m[2].split('"')[-2].split("/")[-1] for m in _FILE.finditer(text)}
    body = text[entry.end() :]
    body = body[: body.index("$L__func_end0")]
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source = ""
    for raw in body.split("\n"):
        line = raw.split("//")[0].strip()
        while line:
            location = _LOCATION.match(line)
            if location:
                source = f"{files.get(int(location[1]), '?')}:{location[2]}"
            if line.startswith(".") or not line.strip("{} "):
                break
            label = _LABEL.match(line)
            if label:
                labels[label[1]] = len(instructions)
                line = label[2]
                continue
            statement, separator, line = line.partition(";")
            if not separator:
                raise ValueError(f"cannot parse the PTX line {raw.strip()!r}")
            statement, line = statement.strip().lstrip("{").strip(), line.strip()
            if statement and not statement.startswith("."):
                instructions.append(_instruction(statement, source))
    parameters = tuple(re.findall(r"\w+_param_\d+", entry[2]))
    return Program(entry[1], parameters, int(threads[1]), tuple(instructions), labels)


def _instruction(statement: str, source: str) -> Instruction:
    guard = _GUARD.match(statement)
    if guard:
        statement = guard[3]
    opcode, _, rest = statement.partition(" ")
    opcode, _, tail = opcode.partition("\t")
    operands = tuple(x.strip() for x in re.split(r",(?![^{\[]*[}\]])", tail + rest) if x.strip())
    return Instruction(tuple(opcode.split(".")), operands, guard[2] if guard else "", bool(guard and guard[1]), source)
