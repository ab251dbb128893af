"""Does a token of one stream take as long as reading the weights? With `sdm.optimize_for_decoding` and without.

    python benchmarks/decoding.py [--one-thread] [--model FOLDER --text FILE]

The hybrids of `hybrid_models.py`: four blocks of level-1 width, one of them global. The speed of reading is that of
summing 256 MB of float32. What rounded weights do to the likelihood is measured on a trained model: the example model
of the package on statements and questions of the kind that it knows, or a model and a text of your own.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from pathlib import Path
from typing import Any

import torch

import sdm
from _harness import Ratio, report, time_interleaved
from hybrid_models import behind, decode, hybrid

CONTEXT = 32_768
TOKENS = 8
NLL_TOKENS = 6_144
WORDS = [
    "window",
    "river",
    "garden",
    "bridge",
    "candle",
    "forest",
    "mirror",
    "anchor",
    "basket",
    "harbor",
    "ladder",
    "meadow",
]


def read_bytes(model: Any) -> int:
    """Bytes of the linear layers, which a token reads; the rows that a memory reads are few."""
    layers = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    return sum(layer.weight.nbytes for layer in layers)


def statements() -> str:
    """Numbers told and asked for in the words of RULER's needle tasks."""
    generator, lines = random.Random(0), []
    for _ in range(400):
        word, number = generator.choice(WORDS), generator.randrange(10**6, 10**7)
        lines.append(f" One of the special magic numbers for {word} is: {number}.")
        lines.append(f" The special magic number for {word} mentioned in the provided text is: {number}.")
    return "".join(lines)


@torch.no_grad()
def likelihoods(folder: Path | None, text: str) -> dict[str, float]:
    """Mean NLL of a text's first tokens with each kind of weights, in nats."""
    if folder is None:
        model, tokenizer = sdm.example_model()
    else:
        from transformers import AutoTokenizer

        model, tokenizer = sdm.SDMForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text).input_ids[:NLL_TOKENS]])
    return {
        weights: float(sdm.optimize_for_decoding(copy.deepcopy(model), weights)(ids, labels=ids).loss)
        for weights in ("float32", "bfloat16", "int8")
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, help="folder of the model whose likelihood is measured")
    parser.add_argument("--text", type=Path, help="file of the text")
    parser.add_argument(
        "--one-thread", action="store_true", help="processor time of one thread, which a busy machine disturbs less"
    )
    given = parser.parse_args()
    if given.one_thread:
        torch.set_num_threads(1)
    if (given.model is None) != (given.text is None):
        parser.error("--model and --text go together")
    nll = likelihoods(given.model, statements() if given.text is None else given.text.read_text())
    plain = hybrid("sdm")
    models = {"as loaded": plain}
    for weights in ("float32", "bfloat16", "int8"):
        models[weights] = sdm.optimize_for_decoding(copy.deepcopy(plain), weights)
    models["full attention"] = sdm.optimize_for_decoding(hybrid("full_attention"))
    candidates: dict[str, Any] = {name: decode(model, behind(model, CONTEXT), TOKENS) for name, model in models.items()}
    buffer = torch.ones(1 << 26)
    candidates["reading 256 MB"] = buffer.sum
    clock = time.thread_time if given.one_thread else time.perf_counter
    times = time_interleaved(candidates, seconds=30, clock=clock)
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
    for weights, value in nll.items():
        print(f"    NLL with {weights} weights: {value:.4f}")
    report(
        "decoding_one_thread" if given.one_thread else "decoding",
        ratios,
        times,
        {"gigabytes_per_second": bandwidth / 1e9, "nll": nll},
    )


if __name__ == "__main__":
    main()
