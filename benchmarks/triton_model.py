"""Modelled times of the Triton kernels on GPUs that are not here.

python -m benchmarks.triton_model [--levels 1 8 13] [--gpus A100 H100] [--slots uniform zipf] [--no-table]
python -m benchmarks.triton_model --store [--levels 1 3 5 6 8 13]

The compiled kernels run in the emulator of `benchmarks/ptx`, a block of each, and `benchmarks/ptx/latency.py` says how
long it would take. Two lengths tell what a token costs. **A model, not a measurement**: no GPU was at hand. Writes the
table of docs/performance.md; with --store the numbers that
`sdm plan` uses (src/sdm/plan/kernels.json).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks._pages import write_between
from benchmarks._triton_cases import ACCESSES, sizes, sparse_tokens
from benchmarks.ptx.emulate import emulated, resources
from benchmarks.ptx.latency import Schedule
from benchmarks.ptx.machine import Observer
from benchmarks.ptx.program import Program

from sdm import ops
from sdm.models.cost import ladder
from sdm.models.layer_types.base import derived
from sdm.ops.sparse_delta_rule.triton import layout
from sdm.ops.sparse_delta_rule.triton.host import Links
from sdm.ops.triton.availability import version
from sdm.ops.triton.launch import Launch
from sdm.plan.kernel_time import GPU, GPUS, STORED, Estimate, Kernel, stored_kernels

BEGIN, END = "<!-- model: made by benchmarks/triton_model.py -->", "<!-- end of model -->"
NAMES = layout.Accesses._fields  # of layouts
LENGTHS = (16, 48)  # tokens that are emulated
GATED_LENGTHS = (128, 256)  # of the gated delta rule: chunks of 64
CHANNELS = 32  # of the emulated call: blocks own equal slabs, so that one of them shows all
PER_BLOCK = ("forward_kernel", "backward_kernel", "carry_kernel", "carry_backward_kernel")
"""Kernels whose blocks walk a whole sequence. A block of the others has one chunk."""
COMMON = frozenset(
    {"from_state", "keys", "decay", "write_weight", "beta", "log_decay", "read_weight", "cu_seqlens", *Links._fields}
)
"""What the blocks of all channels of a sequence read."""


@contextmanager
def _watched(gpu: GPU, seen: dict[str, tuple[Launch, Schedule, int]]) -> Iterator[None]:
    """Emulate a block of each kernel under the model; kernels that others depend on run in full."""

    def observer(launch: Launch, program: Program, number: int) -> Observer | None:
        if number != 0:
            return None
        taken = resources(launch, gpu.target)
        fit = gpu.resident(program.threads, taken.registers, taken.shared)
        common = COMMON if launch.name in PER_BLOCK else frozenset()
        schedule = Schedule(gpu, gpu.l2 / (gpu.multiprocessors * fit), common)
        name = launch.name if launch.name not in seen else f"{launch.name} of backward"
        seen[name] = launch, schedule, program.threads
        return schedule

    alone = (*PER_BLOCK, "reduce_kernel", "select_kernel", "gather_gradient_kernel")
    first: dict[str, Callable[[int], list[int]]] = {name: (lambda size: [0]) for name in alone}
    first["rank_halves_kernel"] = lambda size: [0, 1]  # the two halves of a row
    with emulated(gpu.target, check_races=False, only=first, observer=observer):
        yield


def kernels(
    level: int,
    gpu: GPU,
    name: str,
    dtype: torch.dtype = torch.float32,
    zipf: bool = False,
    backward: bool = True,
) -> dict[str, Kernel]:
    """The kernels of a call at a ladder level, by name, in the layout of this name."""
    heads, n, _ = sizes(level)
    lengths: list[dict[str, tuple[Launch, Schedule, int]]] = []
    for time in LENGTHS:
        tokens, table = sparse_tokens(1, time, heads, n * n, CHANNELS, dtype, zipf)
        leaves = [x.requires_grad_() if x.is_floating_point() else x for x in (*tokens, table)]
        seen: dict[str, tuple[Launch, Schedule, int]] = {}
        with _watched(gpu, seen), layout.chosen(name):
            y, _ = ops.sparse_delta_rule(*leaves[:-1], initial_state=leaves[-1], backend="triton")
            forward = set(seen)
            if backward:
                y.backward(torch.ones_like(y))
        lengths.append(seen)
    short, long = lengths
    result = {}
    for kernel_name, (launch, schedule, threads) in long.items():
        arguments, taken = launch.arguments, resources(launch, gpu.target)
        kernel = partial(Kernel, registers=taken.registers, shared=taken.shared, threads=threads)
        kernel = partial(kernel, backward=kernel_name not in forward, spilled=taken.spilled)
        if launch.name in PER_BLOCK:
            usage = (schedule.usage - short[kernel_name][1].usage) * (1 / (LENGTHS[1] - LENGTHS[0]))
            result[kernel_name] = kernel(usage, channels=arguments["S"])
        else:
            # A block of `reduce_kernel` reads a part of each slab.
            per_slab = CHANNELS if launch.name == "reduce_kernel" else 0
            result[kernel_name] = kernel(schedule.usage, tokens=arguments["C"], per_slab=per_slab)
    return result


SELECTIONS = 2  # of a token and head: slots to write and slots to read


def selection_kernels(level: int, gpu: GPU) -> dict[str, Kernel]:
    """The kernels that select the slots of a token, by name."""
    _, n, _ = sizes(level)
    scores = torch.randn(1, 2, 1, 2 * n, generator=torch.Generator().manual_seed(0), requires_grad=True)
    seen: dict[str, tuple[Launch, Schedule, int]] = {}
    with _watched(gpu, seen):
        values, _ = ops.product_key_topk(scores, ACCESSES, backend="triton")
        forward = set(seen)
        values.backward(torch.ones_like(values))
    result = {}
    for name, (launch, schedule, threads) in seen.items():
        taken = resources(launch, gpu.target)
        blocks = 2 * SELECTIONS if launch.name == "rank_halves_kernel" else SELECTIONS
        result[name] = Kernel(
            schedule.usage, taken.registers, taken.shared, threads, name not in forward, tokens=1 / blocks
        )
    return result


def gated_kernels(level: int, gpu: GPU) -> dict[str, Kernel]:
    """The kernels of the gated delta rule of Gated DeltaNet at a ladder level, by name."""
    config = ladder(level, "gdn")
    heads, keys = derived(config.num_attention_heads), derived(config.recurrent_key_dim)
    lengths: list[dict[str, tuple[Launch, Schedule, int]]] = []
    for time in GATED_LENGTHS:
        shapes = (keys,), (keys,), (config.hidden_size // heads,), (), ()
        query, key, value, beta, decay = (torch.randn(1, time, 1, *shape) for shape in shapes)
        query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
        leaves = [x.requires_grad_() for x in (query, key, value, beta.sigmoid(), -decay.abs())]
        seen: dict[str, tuple[Launch, Schedule, int]] = {}
        with _watched(gpu, seen):
            y, _ = ops.gated_delta_rule(*leaves, backend="triton")
            forward = set(seen)
            y.backward(torch.ones_like(y))
        lengths.append(seen)
    short, long = lengths
    result = {}
    for name, (launch, schedule, threads) in long.items():
        usage = (schedule.usage - short[name][1].usage) * (1 / (GATED_LENGTHS[1] - GATED_LENGTHS[0]))
        taken, slab = resources(launch, gpu.target), launch.arguments["S"]
        result[name] = Kernel(usage, taken.registers, taken.shared, threads, name not in forward, channels=slab)
    return result


def gated_rows(levels: list[int], gpus: list[str], batches: tuple[int, ...], time: int) -> Iterator[str]:
    """Times of the kernels that carry the state of Gated DeltaNet, without the products around them."""
    for name in gpus:
        for level in levels:
            config, carried = ladder(level, "gdn"), gated_kernels(level, GPUS[name])
            heads = derived(config.num_attention_heads)
            for batch in batches:
                times = [x.time(GPUS[name], batch * heads, time, config.hidden_size // heads) for x in carried.values()]
                cells = [f"{1e3 * x.low:.2f}-{1e3 * x.high:.2f}" for x in times]
                yield f"| {name}, level {level}, gated delta rule | {batch} | {' | '.join(cells)} |"


SMALLEST = (1, 8)
"""The levels with the fewest channels of one head and of two: larger ones have too many programs for `fewest`."""


def store(gpus: list[str], levels: list[int]) -> None:
    """Write what `sdm plan` knows of the kernels anew: one entry for the sizes of each level."""
    stored: dict[str, Any] = {"kernels": {}}
    stored["command"], stored["triton"] = "python -m benchmarks.triton_model --store", version()
    for name in gpus:
        for level in levels:
            heads, _, channels = sizes(level)
            selection = {kernel: x.stored() for kernel, x in selection_kernels(level, GPUS[name]).items()}
            stored["kernels"].setdefault(name, {})[f"{heads}x{channels}"] = {
                chosen: {kernel: x.stored() for kernel, x in kernels(level, GPUS[name], chosen).items()} | selection
                for chosen in (NAMES if level in SMALLEST else ("few", "many"))
            }
            print(f"{name}, level {level}: {heads} x {channels}", flush=True)
    write_stored(stored)


def write_stored(stored: dict[str, Any]) -> None:
    """Write the file, a kernel in each line."""
    text = json.dumps(stored, indent=1)
    text = re.sub(
        r'("\w[\w ]*_kernel[\w ]*": )(\{.*?\}.*?\})', lambda m: m[1] + " ".join(m[2].split()), text, flags=re.DOTALL
    )
    STORED.write_text(text + "\n")


def differences(level: int, gpu: GPU) -> list[str]:
    """Where the stored numbers are not what the model says now, for the kernels of forward with few programs."""
    heads, _, channels = sizes(level)
    stored = stored_kernels()[gpu.name][f"{heads}x{channels}"]["few"]
    fresh = kernels(level, gpu, "few", backward=False) | selection_kernels(level, gpu)
    result = []
    for name, kernel in fresh.items():
        before, now = stored[name].stored(), kernel.stored()
        for place, x in now["usage"].items():
            # A row is in the L2 cache or not by a hair's breadth, and tensors lie at other addresses.
            if abs(x - before["usage"][place]) > 0.02 * abs(x) + 1e-3:
                result.append(f"{name}: {place} is {x}, stored {before['usage'][place]}")
        others = [x for x in now if x != "usage" and now[x] != before[x]]
        result += [f"{name}: {x} is {now[x]}, stored {before[x]}" for x in others]
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
    known: dict[str, dict[str, Kernel]] = {}
    result = {}
    for batch in batches:
        both = {False: Estimate(), True: Estimate()}
        for backward, limits in ((False, layout.FORWARD), (True, layout.BACKWARD)):
            name = layout.Layout.name(ACCESSES, ACCESSES, channels, limits, batch * heads)
            if name not in known:
                known[name] = kernels(level, gpu, name, **options)
            for kernel in known[name].values():
                if kernel.backward == backward:
                    both[backward] += kernel.time(gpu, batch * heads, time, channels)
        result[batch] = both[False], both[True]
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


def details(level: int, gpu: GPU, layout_name: str, zipf: bool = False) -> list[str]:
    """What limits each kernel: cycles per token of a block, registers, blocks of a multiprocessor, barriers."""
    lines = []
    for name, kernel in (kernels(level, gpu, layout_name, zipf=zipf) | selection_kernels(level, gpu)).items():
        use = kernel.usage
        lines.append(
            f"{name:28} {use.reordered:8.0f}-{use.in_order:<8.0f} cycles, issue {use.issue:7.0f}, "
            f"path {use.path:7.0f}, "
            f"{use.memory:7.0f} bytes, {use.barriers:5.1f} barriers, "
            f"{kernel.registers} registers, spilled {kernel.spilled}, shared {kernel.shared}, "
            f"{gpu.resident(kernel.threads, kernel.registers, kernel.shared)} blocks of {kernel.threads} threads"
        )
    return lines


LEAST_BLOCKS = {"forward_kernel": {"fewest": 1, "few": 2, "many": 8}, "backward_kernel": dict.fromkeys(NAMES, 8)}
"""Of a multiprocessor, by layout."""
MOST_BARRIERS = {"forward_kernel": {"fewest": 3, "few": 6, "many": 17}, "backward_kernel": dict.fromkeys(NAMES, 28)}
"""Per token, by layout."""


def problems(level: int, gpu: GPU) -> list[str]:
    """What is worse than the layouts were chosen for: registers spilled, blocks of a multiprocessor, barriers."""
    result = []
    for chosen in NAMES:
        for name, kernel in kernels(level, gpu, chosen).items():
            if kernel.spilled:
                result.append(f"{name} spills {kernel.spilled} bytes")
            if name in MOST_BARRIERS:
                blocks = gpu.resident(kernel.threads, kernel.registers, kernel.shared)
                barriers = kernel.usage.barriers
                if blocks < LEAST_BLOCKS[name][chosen]:
                    result.append(f"{name}, {chosen}: {blocks} blocks of a multiprocessor")
                if barriers > MOST_BARRIERS[name][chosen]:
                    result.append(f"{name}, {chosen}: {barriers:.1f} barriers per token")
    return result


def main() -> int:
    """Print the table and write it into docs/performance.md; with --check, 1 if a kernel is worse than it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+")
    parser.add_argument("--gpus", nargs="+", default=["A100", "H100"], choices=list(GPUS))
    parser.add_argument("--slots", nargs="+", default=["uniform"], choices=["uniform", "zipf"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--time", type=int, default=8192)
    parser.add_argument("--check", action="store_true", help="check spills, blocks and barriers, and nothing else")
    parser.add_argument("--details", action="store_true", help="print what limits each kernel, and no table")
    parser.add_argument("--no-table", action="store_true", help="leave docs/performance.md as it is")
    parser.add_argument("--store", action="store_true", help="write what `sdm plan` uses, and no table")
    parser.add_argument("--check-stored", action="store_true", help="compare a part of what is stored, no table")
    parser.add_argument("--gated", action="store_true", help="the gated delta rule, no table")
    options = parser.parse_args()
    options.levels = options.levels or ([1, 3, 5, 6, 8, 13] if options.store else [1, 8, 13])
    if options.store:
        store(options.gpus, options.levels)
        return 0
    if options.gated:
        for line in gated_rows(options.levels, options.gpus, tuple(options.batches), options.time):
            print(line, flush=True)
        return 0
    if options.check_stored:
        found = [x for name in options.gpus for level in options.levels for x in differences(level, GPUS[name])]
        print(*found, f"{len(found)} differences", sep="\n")
        return 1 if found else 0
    if options.check:
        worse = [x for name in options.gpus for level in options.levels for x in problems(level, GPUS[name])]
        print(*worse, f"{len(worse)} problems", sep="\n")
        return 1 if worse else 0
    if options.details:
        for name in options.gpus:
            for level in options.levels:
                for chosen in NAMES:
                    print(f"{name}, level {level}, W = R = {ACCESSES}, {chosen} programs")
                    print(*details(level, GPUS[name], chosen), sep="\n", flush=True)
        return 0
    lines = rows(options.levels, options.gpus, tuple(options.batches), options.time, options.slots)
    if not options.no_table:
        write_between(Path(__file__).parent.parent / "docs" / "performance.md", (BEGIN, END), lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
