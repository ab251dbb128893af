"""What does a trace cost? The map of a layer from reading tokens to writing tokens, against the op's own forward pass.

    python benchmarks/trace.py [T]

A layer of the paper's level 1: D = 768 channels, N = 36,864 slots, W = R = 64, T = 8,192 tokens. The map with what each
token writes must give the readings back.
"""

from __future__ import annotations

import sys

import torch

from _harness import Ratio, report, time_interleaved
from sdm.layers.reads import memory_reads
from sdm.ops import sparse_delta_map
from sparse_delta_rule import forward, tokens_of

WIDTH, SLOTS = 768, 36864
LARGEST_RATIO, LARGEST_ERROR = 10.0, 1e-5


def main() -> None:
    time = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    torch.manual_seed(0)
    tokens, state = tokens_of(time, SLOTS, WIDTH), 0.01 * torch.randn(1, SLOTS, WIDTH)
    reads = memory_reads(tokens, state.unsqueeze(0))
    error = reads.error()
    if not error <= LARGEST_ERROR:
        raise SystemExit(f"the parts of the readings deviate by {error:.3g} of the largest; no ratio is reported")
    pairs = len(reads.read_map.source)
    del reads
    times = time_interleaved(
        {
            "map": lambda: sparse_delta_map(*tokens, num_slots=SLOTS),
            "op forward": forward(tokens, state, SLOTS),
        }
    )
    ratios = [
        Ratio(f"map of {time:,} tokens / op forward", times["map"] / times["op forward"], LARGEST_RATIO),
        Ratio("relative error of the readings from their parts, in units of 1e-5", 1e5 * error, 1e5 * LARGEST_ERROR),
    ]
    report("trace", ratios, times, {"tokens": time, "pairs": pairs, "relative_error": error})


if __name__ == "__main__":
    main()
