"""Bytes that the Triton kernels of the sparse delta rule move per token, and what that would mean on a GPU.

python -m benchmarks.triton_traffic [--no-table]

Triton's interpreter counts what every program loads and stores at level 1 of the ladder (N = 36864, W = R = 64), at two
small numbers of channels; traffic is linear in the number of channels, because programs own equal slabs of them, and is
extended to D = 768. The minimum moves each row that a chunk touches once in each direction, inputs and outputs once.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks._pages import write_between
from benchmarks._triton_cases import ACCESSES, sizes

from benchmarks import _row_cache
from sdm import ops

CHUNKS = (8, 64, 256)  # the kernels take 8 tokens at a time; the paper 64 and more
BEGIN, END = "<!-- traffic: made by benchmarks/triton_traffic.py -->", "<!-- end of traffic -->"
GPUS = {"A100 80GB": (2.04e12, 40e6), "H100 SXM": (3.35e12, 50e6), "MI300X": (5.3e12, 256e6)}
"""Bytes per second of memory and bytes of the last cache, as their vendors state them."""


def token_bytes(channels: int) -> int:
    """Value, output, weights and gates in float32, indices of 64 bits."""
    return 4 * (2 * channels + 4 * ACCESSES + 2) + 8 * ACCESSES


def minimum(num_slots: int, channels: int, chunk: int, backward: bool = False, again: bool = True) -> float:
    """Bytes per token in float32, with indices drawn evenly.

    Forward reads the distinct rows that a chunk writes or reads and writes those that it writes. Backward runs the
    writes again (if `again` is counted), walks back over memory and gradient, both read and written, and reads the rows
    that were read.
    """
    row = 4 * channels
    written = num_slots * -math.expm1(-chunk * ACCESSES / num_slots) / chunk
    touched = num_slots * -math.expm1(-2 * chunk * ACCESSES / num_slots) / chunk
    tokens = token_bytes(channels)
    forward = (touched + written) * row + tokens
    if not backward:
        return forward
    replayed = 2 * written * row if again else 0
    walked = (touched + written) * row + 2 * touched * row  # memory restored, gradient carried
    return forward + replayed + walked + 2 * tokens


def measured(channels: int, time: int, backward: bool, num_slots: int) -> dict[str, float]:
    """Bytes per token that each kernel moves."""
    from sdm.ops.triton.interpreter import count_traffic

    generator = torch.Generator().manual_seed(0)

    def index() -> torch.Tensor:
        drawn = [torch.randperm(num_slots, generator=generator)[:ACCESSES].sort().values for _ in range(time)]
        return torch.stack(drawn).view(1, time, 1, ACCESSES)

    def floats(*shape: int) -> torch.Tensor:
        return torch.rand(1, time, 1, *shape, generator=generator)

    tokens = [index(), floats(ACCESSES).softmax(-1), floats(channels), floats(), -0.2 * floats()]
    tokens += [index(), floats(ACCESSES).softmax(-1)]
    table = torch.zeros(1, num_slots, channels)
    leaves = [x.requires_grad_(backward) if x.is_floating_point() else x for x in (*tokens, table)]
    with count_traffic() as traffic:
        y, _ = ops.sparse_delta_rule(*leaves[:-1], initial_state=leaves[-1], backend="triton")
        if backward:
            y.sum().backward()
    return {name: counted.moved / time for name, counted in traffic.items()}


def at_level(channels: int, time: int, backward: bool, num_slots: int, probes: tuple[int, int] = (32, 64)) -> float:
    """Bytes per token of all kernels, extended linearly from two small numbers of channels."""
    small, large = (sum(measured(probe, time, backward, num_slots).values()) for probe in probes)
    slope = (large - small) / (probes[1] - probes[0])
    return large + slope * (channels - probes[1])


def rows(measure: Callable[[bool], float], num_slots: int, channels: int) -> tuple[list[str], list[float]]:
    heads = "".join(f" minimum, C = {chunk} | ratio |" for chunk in CHUNKS)
    lines = [f"| | counted |{heads}", "|---|---:|" + "---:|---:|" * len(CHUNKS)]
    counts = [measure(backward) for backward in (False, True)]
    ways = [
        ("forward", counts[0], False, True),
        ("forward + backward", counts[1], True, True),
        ("the same, writes run once in the minimum", counts[1], True, False),
    ]
    for name, counted, backward, again in ways:
        cells = []
        for chunk in CHUNKS:
            least = minimum(num_slots, channels, chunk, backward, again)
            cells.append(f" {least / 1e3:.0f} kB | {counted / least:.2f} |")
        lines.append(f"| {name} | {counted / 1e3:.0f} kB |" + "".join(cells))
    return lines, counts


def estimates(num_slots: int, channels: int, counts: list[float], time: int) -> list[str]:
    """Tokens per second if all bytes came from memory; and bytes that the cache does not hold, beside the minimum."""
    head = f"of the minimum, C = {CHUNKS[-1]}"
    lines = [
        f"| | forward | forward + backward | cache | forward, {head} | forward + backward, {head} |",
        "|---|" + "---:|" * 5,
    ]
    row, tokens = 4 * channels, token_bytes(channels)
    for gpu, (bandwidth, cache) in GPUS.items():
        cells = [f" {bandwidth / x / 1e6:.2f} M |" for x in counts] + [f" {cache / 1e6:.0f} MB |"]
        rows = [
            _row_cache.moved(walk(time, num_slots, ACCESSES), int(cache // row), time // 2)
            for walk in (_row_cache.forward, _row_cache.replay, _row_cache.walk_back)
        ]
        for backward, count in ((False, rows[0] * row + tokens), (True, sum(rows) * row + 3 * tokens)):
            cells.append(f" {count / minimum(num_slots, channels, CHUNKS[-1], backward):.2f} |")
        lines.append(f"| {gpu}, {bandwidth / 1e12:.2f} TB/s |" + "".join(cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", type=int, default=32, help="tokens that are counted")
    parser.add_argument("--no-table", action="store_true", help="leave docs/performance.md as it is")
    options = parser.parse_args()
    _, n, channels = sizes(1)
    lines, counts = rows(lambda backward: at_level(channels, options.time, backward, n * n), n * n, channels)
    lines += ["", "**Estimate, not a measurement**, of tokens per second and head if memory were the only limit:", ""]
    lines += estimates(n * n, channels, counts, time=4096)
    print(*lines, sep="\n")
    if not options.no_table:
        write_between(Path(__file__).parent.parent / "docs" / "performance.md", (BEGIN, END), lines)


if __name__ == "__main__":
    main()
