"""Does a token of one stream take as long as reading the weights? With `sdm.optimize_for_decoding` and without.

    python benchmarks/decoding.py

The hybrids of `hybrid_models.py`: four blocks of level-1 width, one of them global. The speed of reading is that of
summing 256 MB of float32.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

import sdm
from _harness import Ratio, report, time_interleaved
from hybrid_models import behind, decode, hybrid

CONTEXT = 32_768
TOKENS = 8


def read_bytes(model: Any) -> int:
    """Bytes of the linear layers, which a token reads; the rows that a memory reads are few."""
    layers = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    return sum(layer.weight.nbytes for layer in layers)


def main() -> None:
    plain = hybrid("sdm")
    models = {"as loaded": plain}
    for weights in ("float32", "bfloat16", "int8"):
        models[weights] = sdm.optimize_for_decoding(copy.deepcopy(plain), weights)
    models["full attention"] = sdm.optimize_for_decoding(hybrid("full_attention"))
    candidates: dict[str, Any] = {name: decode(model, behind(model, CONTEXT), TOKENS) for name, model in models.items()}
    buffer = torch.ones(1 << 26)
    candidates["reading 256 MB"] = buffer.sum
    times = time_interleaved(candidates, seconds=30)
    bandwidth = buffer.nbytes / times.pop("reading 256 MB")
    times = {name: seconds / TOKENS for name, seconds in times.items()}
    ratios = [
        Ratio(
            f"a token / reading its weights, {name}",
            times[name] / (read_bytes(models[name]) / bandwidth),
            1.6,
        )
        for name in ("as loaded", "float32", "bfloat16", "int8")
    ]
    ratios.append(Ratio("a token at 32k, SDM / full attention", times["float32"] / times["full attention"], 0.35))
    report("decoding", ratios, times, {"gigabytes_per_second": bandwidth / 1e9})


if __name__ == "__main__":
    main()
