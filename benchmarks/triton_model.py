"""Modelled times of the Triton kernels on GPUs that are not here.

python -m benchmarks.triton_model [--levels 1 8 13] [--gpus A100 H100] [--slots uniform zipf] [--no-table]

The compiled kernels run in the emulator of `benchmarks/ptx`, a block of each, and `benchmarks/ptx/latency.py` says how
long it would take. Two lengths tell what a token costs. **A model, not a measurement**: no GPU was at hand. Writes the
table of docs/performance.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks._pages import write_between
from benchmarks._triton_cases import ACCESSES, sizes, sparse_tokens
from benchmarks.ptx.emulate import emulated, resources
from benchmarks.ptx.latency import GPU, GPUS, Estimate, Schedule, Usage, estimate
from benchmarks.ptx.machine import Observer
from benchmarks.ptx.program import Program

from sdm import ops
from sdm.ops.sparse_delta_rule.triton import layout
from sdm.ops.sparse_delta_rule.triton.host import Links
from sdm.ops.triton.ahead_of_time import Resources
from sdm.ops.triton.launch import Launch

BEGIN, END = "<!-- model: made by benchmarks/triton_model.py -->", "<!-- end of model -->"
LENGTHS = (16, 48)  # tokens that are emulated
CHANNELS = 32  # of the emulated call: blocks own equal slabs, so that one of them shows all
PER_BLOCK = ("forward_kernel", "backward_kernel")
"""Kernels whose blocks walk a whole sequence. A block of the others has one chunk."""
COMMON = frozenset({"write_weight", "beta", "log_decay", "read_weight", "cu_seqlens", *Links._fields})
"""What the blocks of all channels of a sequence read."""


@dataclass(frozen=True)
class Kernel:
    """What a block of a kernel needs per token (or, if it has one chunk, in all), and how many there are."""

    usage: Usage
    taken: Resources
    threads: int
    tokens: int
    """Of a block that has one chunk; 0: it walks a sequence."""
    channels: int
    """That a block owns; 0: all."""

    def time(self, gpu: GPU, batch: int, time: int, heads: int, channels: int) -> Estimate:
        """Of the launches of a call."""
        blocks = batch * heads
        if self.tokens:
            return estimate(gpu, self.usage, blocks * -(-time // self.tokens), self.threads, self.taken)
        return estimate(gpu, self.usage * time, blocks * -(-channels // self.channels), self.threads, self.taken)


@contextmanager
def _watched(gpu: GPU, seen: dict[str, tuple[Launch, Schedule, int]]) -> Iterator[None]:
    """Emulate a block of each kernel under the model; kernels that others depend on run in full."""

    def observer(launch: Launch, program: Program, number: int) -> Observer | None:
        if number != 0:
            return None
        fit = gpu.resident(program.threads, resources(launch, gpu.target))
        common = COMMON if launch.name in PER_BLOCK else frozenset()
        schedule = Schedule(gpu, gpu.l2 / (gpu.multiprocessors * fit), common)
        name = launch.name if launch.name not in seen else f"{launch.name} of backward"
        seen[name] = launch, schedule, program.threads
        return schedule

    first = {name: (lambda size: [0]) for name in (*PER_BLOCK, "reduce_kernel")}
    with emulated(gpu.target, check_races=False, only=first, observer=observer):
        yield


def kernels(
    level: int, gpu: GPU, training: bool, many: bool, dtype: torch.dtype = torch.float32, zipf: bool = False
) -> dict[str, Kernel]:
    """The kernels of a call at a ladder level, by name, in the layout for few or for many programs."""
    heads, n, channels = sizes(level)
    lengths: list[dict[str, tuple[Launch, Schedule, int]]] = []
    for time in LENGTHS:
        tokens, table = sparse_tokens(1, time, heads, n * n, CHANNELS, dtype, zipf)
        leaves = [x.requires_grad_(training) if x.is_floating_point() else x for x in (*tokens, table)]
        seen: dict[str, tuple[Launch, Schedule, int]] = {}
        with _watched(gpu, seen), layout.chosen(many):
            y, _ = ops.sparse_delta_rule(*leaves[:-1], initial_state=leaves[-1], backend="triton")
            if training:
                y.backward(torch.ones_like(y))
        lengths.append(seen)
    short, long = lengths
    result = {}
    for name, (launch, schedule, threads) in long.items():
        arguments, taken = launch.arguments, resources(launch, gpu.target)
        if launch.name in PER_BLOCK:
            usage = (schedule.usage - short[name][1].usage) * (1 / (LENGTHS[1] - LENGTHS[0]))
            result[name] = Kernel(usage, taken, threads, 0, arguments["S"])
        else:
            # A block of `reduce_kernel` reads a part of each slab.
            slabs = channels / CHANNELS if launch.name == "reduce_kernel" else 1
            result[name] = Kernel(schedule.usage * slabs, taken, threads, arguments["C"], 0)
    return result


def least_seconds(gpu: GPU, level: int, batch: int, time: int) -> tuple[float, float]:
    """Forward and backward, if memory were the only limit: a chunk of 8 moves each of its rows once."""
    from benchmarks.triton_traffic import minimum

    heads, n, channels = sizes(level)
    forward = minimum(n * n, channels, 8)
    both = minimum(n * n, channels, 8, backward=True)
    tokens = batch * time * heads
    return forward * tokens / gpu.bandwidth, (both - forward) * tokens / gpu.bandwidth


def totals(
    level: int, gpu: GPU, batches: tuple[int, ...], time: int, **options: bool
) -> dict[int, tuple[Estimate, Estimate]]:
    """Forward without gradients, and backward, for each batch size."""
    heads, _, channels = sizes(level)
    known: dict[bool, tuple[dict[str, Kernel], dict[str, Kernel]]] = {}
    result = {}
    for batch in batches:
        many = batch * heads * channels // 8 >= layout.MANY
        if many not in known:
            known[many] = tuple(kernels(level, gpu, training, many, **options) for training in (False, True))
        inference, training = known[many]
        forward, backward = Estimate(0, 0, 0), Estimate(0, 0, 0)
        for kernel in inference.values():
            forward += kernel.time(gpu, batch, time, heads, channels)
        for name, kernel in training.items():
            if name not in inference:
                backward += kernel.time(gpu, batch, time, heads, channels)
        result[batch] = forward, backward
    return result


def rows(levels: list[int], gpus: list[str], batches: tuple[int, ...], time: int, slots: list[str]) -> list[str]:
    """The table."""
    lines = [
        f"| modelled, T = {time}, slots | batch | forward, ms | backward, ms | forward / memory | backward / memory |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in gpus:
        for level in levels:
            for drawn in slots:
                for batch, (forward, backward) in totals(
                    level, GPUS[name], batches, time, zipf=drawn == "zipf"
                ).items():
                    least = least_seconds(GPUS[name], level, batch, time)
                    cells = [
                        *(f"{1e3 * x.low:.1f}-{1e3 * x.high:.1f}" for x in (forward, backward)),
                        *(f"{x.low / m:.1f}-{x.high / m:.1f}" for x, m in zip((forward, backward), least, strict=True)),
                    ]
                    lines.append(f"| {name}, level {level}, {drawn} | {batch} | {' | '.join(cells)} |")
                    print(lines[-1], flush=True)
    return lines


def details(level: int, gpu: GPU, many: bool, zipf: bool = False) -> list[str]:
    """What limits each kernel: cycles per token of a block, registers, blocks of a multiprocessor, barriers."""
    lines = []
    for name, kernel in kernels(level, gpu, True, many, zipf=zipf).items():
        use, taken = kernel.usage, kernel.taken
        lines.append(
            f"{name:28} {use.reordered:8.0f}-{use.in_order:<8.0f} cycles, issue {use.issue:7.0f}, "
            f"path {use.path:7.0f}, "
            f"{use.memory:7.0f} bytes, {use.barriers:5.1f} barriers, "
            f"{taken.registers} registers, spilled {taken.spilled}, "
            f"shared {taken.shared}, {gpu.resident(kernel.threads, taken)} blocks of {kernel.threads} threads"
        )
    return lines


LEAST_BLOCKS = {("forward_kernel", False): 2, ("backward_kernel", False): 2}
LEAST_BLOCKS |= {("forward_kernel", True): 8, ("backward_kernel", True): 8}
"""Of a multiprocessor, by kernel and whether programs are many."""
MOST_BARRIERS = {("forward_kernel", False): 6, ("backward_kernel", False): 36}
MOST_BARRIERS |= {("forward_kernel", True): 17, ("backward_kernel", True): 38}
"""Per token."""


def problems(level: int, gpu: GPU) -> list[str]:
    """What is worse than the layouts were chosen for: registers spilled, blocks of a multiprocessor, barriers."""
    result = []
    for many in (False, True):
        for name, kernel in kernels(level, gpu, True, many).items():
            if kernel.taken.spilled:
                result.append(f"{name} spills {kernel.taken.spilled} bytes")
            if (name, many) in LEAST_BLOCKS:
                blocks, barriers = gpu.resident(kernel.threads, kernel.taken), kernel.usage.barriers
                if blocks < LEAST_BLOCKS[name, many]:
                    result.append(f"{name}, many={many}: {blocks} blocks of a multiprocessor")
                if barriers > MOST_BARRIERS[name, many]:
                    result.append(f"{name}, many={many}: {barriers:.1f} barriers per token")
    return result


def main() -> int:
    """Print the table and write it into docs/performance.md; with --check, 1 if a kernel is worse than it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 8, 13])
    parser.add_argument("--gpus", nargs="+", default=["A100", "H100"], choices=list(GPUS))
    parser.add_argument("--slots", nargs="+", default=["uniform"], choices=["uniform", "zipf"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--time", type=int, default=8192)
    parser.add_argument("--check", action="store_true", help="check spills, blocks and barriers, and nothing else")
    parser.add_argument("--details", action="store_true", help="print what limits each kernel, and no table")
    parser.add_argument("--no-table", action="store_true", help="leave docs/performance.md as it is")
    options = parser.parse_args()
    if options.check:
        worse = [x for name in options.gpus for level in options.levels for x in problems(level, GPUS[name])]
        print(*worse, f"{len(worse)} problems", sep="\n")
        return 1 if worse else 0
    if options.details:
        for name in options.gpus:
            for level in options.levels:
                for many in (False, True):
                    print(f"{name}, level {level}, W = R = {ACCESSES}, {'many' if many else 'few'} programs")
                    print(*details(level, GPUS[name], many), sep="\n", flush=True)
        return 0
    lines = rows(options.levels, options.gpus, tuple(options.batches), options.time, options.slots)
    if not options.no_table:
        write_between(Path(__file__).parent.parent / "docs" / "performance.md", (BEGIN, END), lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
