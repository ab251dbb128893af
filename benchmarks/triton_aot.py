"""Compiles every kernel that ladder levels 1, 8 and 13 launch, for GPUs that are not here, and checks what they take.

python -m benchmarks.triton_aot [--levels 1 8 13] [--targets sm_80 sm_90 gfx942] [--no-table]

Fails on anything that does not compile, spills registers or takes more shared memory than the GPU has. Writes the table
of docs/performance.md. Triton keeps what it compiled: a second run takes seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._pages import write_between
from benchmarks._triton_cases import DTYPES, calls, launches_of

from sdm.ops.triton.launch import Launch, Pointer

BEGIN, END = "<!-- kernels: made by benchmarks/triton_aot.py -->", "<!-- end of kernels -->"
_work: list[tuple[Launch, str]] = []


def specialisation(launch: Launch) -> tuple[Any, ...]:
    """What Triton compiles a kernel anew for: types and alignments of pointers, constants, and of other integers
    whether they are 1, a multiple of 16, or wide."""
    constant = {x.name: x.is_constexpr for x in launch.kernel.params}

    def seen(name: str, x: Any) -> Any:
        if constant[name] or isinstance(x, Pointer) or not isinstance(x, int):
            return x
        return "one" if x == 1 else (x % 16 == 0, x.bit_length() > 31)

    arguments = tuple((name, seen(name, x)) for name, x in launch.arguments.items())
    return launch.name, arguments, tuple(sorted(launch.options.items()))


def distinct_launches(levels: list[int]) -> list[Launch]:
    found: dict[tuple[Any, ...], Launch] = {}
    for level in levels:
        for dtype in DTYPES.values():
            for call in calls(level, dtype).values():
                for launch in launches_of(call):
                    found.setdefault(specialisation(launch), launch)
    return sorted(found.values(), key=lambda launch: launch.name)


def _compile(at: int) -> tuple[int, int, int, str]:
    """Registers, spilled bytes, shared memory, and what is wrong."""
    from sdm.ops.triton.ahead_of_time import TARGETS, compile_launch

    launch, name = _work[at]
    try:
        taken = compile_launch(launch, TARGETS[name])
    except Exception as error:  # whatever the compiler has to say
        return 0, 0, 0, f"does not compile: {type(error).__name__}: {str(error)[:2000]}"
    return taken.registers, taken.spilled, taken.shared, taken.problem(TARGETS[name]) or ""


def compile_all(launches: list[Launch], targets: list[str]) -> list[tuple[Launch, str, int, int, int, str]]:
    """On all cores; a compiler that ends the process ends the run."""
    _work[:] = [(launch, target) for launch in launches for target in targets]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        results = []
        for (launch, target), taken in zip(_work, pool.map(_compile, range(len(_work))), strict=True):
            results.append((launch, target, *taken))
            registers, spilled, shared, problem = taken
            print(f"{launch.name:28} {target:7} {registers:3} registers {spilled} spilled {shared:6} shared {problem}")
            sys.stdout.flush()
    return results


def table(results: list[tuple[Launch, str, int, int, int, str]], targets: list[str]) -> list[str]:
    lines = [
        "| kernel | configurations |" + "".join(f" {target} |" for target in targets),
        "|---|---:|" + "---:|" * len(targets),
    ]
    for name in sorted({launch.name for launch, *_ in results}):
        cells = []
        for target in targets:
            of = [taken for launch, on, *taken in results if launch.name == name and on == target]
            registers, spilled, shared = (max(taken[i] for taken in of) for i in range(3))
            cells.append(f" {registers} / {spilled} / {shared} |")
        lines.append(f"| `{name}` | {len(of)} |" + "".join(cells))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 8, 13])
    parser.add_argument("--targets", nargs="+", default=["sm_80", "sm_90", "gfx942"])
    parser.add_argument("--no-table", action="store_true", help="leave docs/performance.md as it is")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("the interpreter does not compile: unset TRITON_INTERPRET")
    results = compile_all(distinct_launches(options.levels), options.targets)
    problems = [f"{launch.name} on {target} {problem}" for launch, target, *_, problem in results if problem]
    if not options.no_table and not problems:
        levels = ", ".join(map(str, options.levels))
        said = "Registers of a thread / bytes spilled / bytes of shared memory, the largest of all configurations"
        lines = [*table(results, options.targets), "", f"{said}, levels {levels}."]
        write_between(Path(__file__).parent.parent / "docs" / "performance.md", (BEGIN, END), lines)
    print(f"{len(results)} compilations, {len(problems)} problems", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
