"""Compiles every kernel that ladder levels 1, 8 and 13 launch, for GPUs that are not here, and checks what they take.

python -m benchmarks.triton_aot [--levels 1 8 13] [--targets sm_80 sm_90 gfx942] [--no-table]

Fails on anything that does not compile, spills registers, takes more shared memory than the GPU has, or whose machine
code (NVIDIA) reads through the read-only path. Writes the table of docs/performance.md. Triton keeps what it compiled:
a second run takes seconds.
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

from sdm.ops.triton.ahead_of_time import TARGETS, Resources, code_problem, compile_launch
from sdm.ops.triton.launch import Launch, Pointer

BEGIN, END = "<!-- kernels: made by benchmarks/triton_aot.py -->", "<!-- end of kernels -->"
Result = tuple[Launch, str, Resources, str]
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


def _compile(at: int) -> tuple[Resources, str]:
    """What the kernel takes, and what is wrong."""
    launch, name = _work[at]
    try:
        taken = compile_launch(launch, TARGETS[name])
        problem = taken.problem(TARGETS[name])
        if problem is None and TARGETS[name].gpu.backend == "cuda":
            problem = code_problem(launch, TARGETS[name])
    except Exception as error:  # whatever the compiler has to say
        return Resources(0, 0, 0), f"does not compile: {type(error).__name__}: {str(error)[:2000]}"
    return taken, problem or ""


def compile_all(launches: list[Launch], targets: list[str]) -> list[Result]:
    """On all cores; a compiler that ends the process ends the run."""
    _work[:] = [(launch, target) for launch in launches for target in targets]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        results = []
        for (launch, target), taken in zip(_work, pool.map(_compile, range(len(_work))), strict=True):
            results.append((launch, target, *taken))
            print(f"{launch.name:24} {target:7} {taken[0]} {taken[1]}")
            sys.stdout.flush()
    return results


def table(results: list[Result], targets: list[str]) -> list[str]:
    lines = [
        "| kernel | configurations |" + "".join(f" {target} |" for target in targets),
        "|---|---:|" + "---:|" * len(targets),
    ]
    for name in sorted({launch.name for launch, *_ in results}):
        cells = []
        for target in targets:
            of = [taken for launch, on, taken, _ in results if launch.name == name and on == target]
            most = (max(getattr(taken, x) for taken in of) for x in ("registers", "spilled", "shared", "parked"))
            registers, spilled, shared, parked = most
            cells.append(f" {registers} / {spilled} / {shared}{f' ({parked})' if parked else ''} |")
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
        note = (
            "In brackets: scalar registers that gfx942 has too few of. Their values wait in lanes of a vector "
            "register, which the first number contains; no memory is moved for them"
        )
        lines = [*table(results, options.targets), "", f"{said}, levels {levels}. {note}."]
        write_between(Path(__file__).parent.parent / "docs" / "performance.md", (BEGIN, END), lines)
    print(f"{len(results)} compilations, {len(problems)} problems", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
