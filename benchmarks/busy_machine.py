"""Does a training step keep its speed, idle and beside busy processes, with the threads that `sdm` takes by default?

    python benchmarks/busy_machine.py
    python benchmarks/busy_machine.py --load 6

Each setting has a process of its own, and the processes take turns, a step each, so that a busy machine slows all of
them alike. The load is made of processes that only count. What counts is the median time of a step of a setting,
relative to the best setting. On a machine that is busy already, the figures of an idle one cannot be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from _harness import Ratio, report
from sdm.__main__ import BLOCK_TIME, SPIN_COUNT, WAIT_SETTINGS

SETTINGS: dict[str, dict[str, str]] = {
    "sdm": {"GOMP_SPINCOUNT": SPIN_COUNT, "KMP_BLOCKTIME": BLOCK_TIME},
    "torch's own": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
# Runs in a process for each setting: a line on standard input asks for a step.
WORKER = """
import sys, time
import torch
import sdm
torch.manual_seed(0)
sizes = {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 4}
model = sdm.SDMForCausalLM(sdm.SDMConfig(**sizes, num_slots=1024, num_writes=16, num_reads=16))
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(1024, (4, 512))
for line in sys.stdin:
    before = time.perf_counter()
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(time.perf_counter() - before, flush=True)
"""


class Worker:
    """A process that trains with some setting of the threads."""

    def __init__(self, setting: dict[str, str]) -> None:
        names = (*WAIT_SETTINGS, "OMP_NUM_THREADS")
        environment = {name: value for name, value in os.environ.items() if name not in names} | setting
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", WORKER], env=environment, **pipes)

    def step(self) -> float:
        """Train one step; return its seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep this many processes busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def step_times(workers: dict[str, Worker], seconds: float) -> dict[str, float]:
    """Median seconds of a step, of each worker in turn."""
    times: dict[str, list[float]] = {name: [] for name in workers}
    start, turns = time.perf_counter(), 0
    while turns < 5 or time.perf_counter() - start < seconds:
        turns += 1
        for name, worker in workers.items():
            times[name].append(worker.step())
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", type=int, nargs="*", default=[0, 6], help="busy processes beside the training")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    options = parser.parse_args()
    others = os.getloadavg()[0]
    workers = {name: Worker(setting) for name, setting in SETTINGS.items()}
    ratios, measured = [], {}
    try:
        for worker in workers.values():
            worker.step()
        for processes in options.load:
            with load(processes):
                if processes:
                    time.sleep(1)
                times = step_times(workers, options.seconds)
            best = min(times, key=times.__getitem__)
            measured |= {f"{processes} busy processes, {name}": seconds for name, seconds in times.items()}
            if processes or others > 0.5:
                busy = f"{processes} busy processes" + (f", load average {others:.0f} before" if others > 0.5 else "")
                ratios.append(Ratio(f"step, {busy}: sdm / best ({best})", times["sdm"] / times[best], 1.5))
            else:
                ratios.append(Ratio("speed, idle machine: sdm / best", times[best] / times["sdm"], 0.97, True))
    finally:
        for worker in workers.values():
            worker.process.kill()
            worker.process.wait()
    report("busy_machine", ratios, measured)


if __name__ == "__main__":
    main()
