"""Decode time of a grafted model relative to its base, at the width of level 1 of the ladder behind 1,024 tokens.

    python benchmarks/graft_decode.py
    python benchmarks/graft_decode.py --context 8192 --attention-window 512

The models take turns in one process, token by token; the ratio of the medians is printed. A window of attention makes a
third model of the same weights.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import sdm
from sdm.evaluation.inference import cache_tensors


def main() -> None:
    """Print the median milliseconds per token of each model, its ratio to the base, and the bytes of its cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--attention-window", type=int, help="also measure a graft that limits attention")
    options = parser.parse_args()
    level = sdm.ladder(1)
    config = LlamaConfig(
        vocab_size=level.vocab_size,
        hidden_size=level.hidden_size,
        intermediate_size=level.intermediate_size,
        num_hidden_layers=level.num_hidden_layers,
        num_attention_heads=level.num_attention_heads,
        num_key_value_heads=level.num_key_value_heads,
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).eval()
    grafted = sdm.graft(copy.deepcopy(base))
    ids = torch.randint(level.vocab_size, (1, options.context))
    models: dict[str, PreTrainedModel] = {"base": base, "grafted": grafted}
    if options.attention_window is not None:
        models["windowed"] = sdm.graft(copy.deepcopy(base), attention_window=options.attention_window)
    with torch.inference_mode():
        caches = {name: model(ids, use_cache=True, logits_to_keep=1).past_key_values for name, model in models.items()}
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(options.tokens):
            for name, model in models.items():
                start = time.perf_counter()
                model(ids[:, :1], past_key_values=caches[name], use_cache=True)
                times[name].append(time.perf_counter() - start)
    medians = {name: 1e3 * statistics.median(values[4:]) for name, values in times.items()}
    print(f"graft: {grafted.graft_cost}")
    for name, median in medians.items():
        megabytes = sum(x.nbytes for x in cache_tensors(caches[name])) / 1e6
        print(f"{name} {median:.2f} ms per token, {median / medians['base']:.3f} of the base, cache {megabytes:.1f} MB")


if __name__ == "__main__":
    main()
