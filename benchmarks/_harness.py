"""What every benchmark shares: interleaved timing, medians, and a JSON file that says where the numbers come from.

A benchmark is a file with a `main()` that builds its inputs, checks that all candidates agree, times them with
`time_interleaved`, and hands `report` the ratios with their targets. Ratios, not times, are what it claims: the
candidates of a ratio run in turn in one process, so that a busy machine slows them alike.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Ratio:
    """One answer: `value` should be at most (or, with `at_least`, at least) `target`."""

    question: str
    value: float
    target: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]],
    seconds: float = 4.0,
    calls: Mapping[str, int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds per call. The candidates take turns until `seconds` have passed, five turns at least.

    A turn is one call, or as many as `calls` says. With `time.thread_time` as clock and one thread, other processes
    matter less: they take caches and bandwidth, but no time.
    """
    for run in candidates.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    start, turns = time.perf_counter(), 0
    while turns < 5 or time.perf_counter() - start < seconds:
        turns += 1
        for name, run in candidates.items():
            for _ in range((calls or {}).get(name, 1)):
                before = clock()
                run()
                times[name].append(clock() - before)
    return {name: statistics.median(values) for name, values in times.items()}


def check_close(what: str, actual: Tensor, expected: Tensor, tolerance: float) -> float:
    """The largest deviation relative to the largest magnitude; wrong results stop the benchmark."""
    scale = expected.double().abs().max().clamp(min=1e-30)
    error = float((actual.double() - expected.double()).abs().max() / scale)
    if not error <= tolerance:
        raise SystemExit(f"{what}: relative error {error:.3g} exceeds {tolerance:g}; no ratio is reported")
    return error


def report(
    name: str, ratios: list[Ratio], times: Mapping[str, float], notes: Mapping[str, object] | None = None
) -> None:
    """Prints the answers and writes results/<name>.json."""
    width = max(len(ratio.question) for ratio in ratios)
    for ratio in ratios:
        sign = ">=" if ratio.at_least else "<="
        verdict = "met" if ratio.met else "MISSED"
        print(f"{ratio.question:<{width}}  {ratio.value:8.3f}  {sign} {ratio.target:<8.3g} {verdict}")
    for label, seconds in times.items():
        print(f"    {label:<40} {1e3 * seconds:9.2f} ms")
    RESULTS.mkdir(exist_ok=True)
    content = {
        "benchmark": name,
        "ratios": [{**asdict(ratio), "met": ratio.met} for ratio in ratios],
        "milliseconds": {label: 1e3 * seconds for label, seconds in times.items()},
        "notes": dict(notes or {}),
        "environment": environment(),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def environment() -> dict[str, object]:
    from sdm.native import core

    return {
        "commit": _command("git", "rev-parse", "--short", "HEAD") + ("+" if _command("git", "status", "-s") else ""),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": core.isa_name() if core is not None else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def in_place_update(megabytes: int = 512) -> tuple[int, Callable[[], object]]:
    """An in-place update of memory far larger than the cache: how many bytes it reads and writes, and a call of it."""
    table = torch.ones(megabytes * 2**20 // 4)
    return 2 * table.nbytes, lambda: table.mul_(0.5)


def peak_memory() -> int:
    """Bytes of this process at its peak. Not ru_maxrss, which a child inherits from the process that starts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("peak memory is read from /proc/self/status, which this system does not have")
