"""Does a hybrid with SDM decode, train and read as fast as promised? Against hybrids with GDN and full attention.

    python benchmarks/hybrid_models.py [decode] [train] [prefill] [memory]

Four blocks of level-1 width (d = 768), three of sliding-window attention and one global layer: what stands in the
global layer is the only difference. The vocabulary is small, so that the layers are what is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import sdm
from _harness import Ratio, check_close, peak_memory, report, time_interleaved
from sdm.layers import GatedDeltaNet

VOCABULARY = 1024
CHUNK = 4096
# One stream reads all weights for one token, which costs every model the same; several share them.
STREAMS = (8, 32)


def hybrid(kind: str) -> Any:
    torch.manual_seed(0)
    config = sdm.ladder(1, kind, vocab_size=VOCABULARY, num_hidden_layers=4)
    return sdm.SDMForCausalLM(config).eval()


@torch.no_grad()
def read(model: Any, length: int, batch: int = 1, chunk: int = CHUNK) -> sdm.SDMCache:
    """A cache behind `length` random tokens."""
    cache = sdm.SDMCache(model.config)
    for ids in torch.randint(0, VOCABULARY, (batch, length)).split(chunk, dim=1):
        model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def behind(model: Any, length: int) -> sdm.SDMCache:
    """A cache as after `length` tokens. The first few are read; the keys and values of the rest repeat them, and a
    recurrent state stays as it is: its size, and so the time, does not depend on what was read."""
    cache = read(model, min(length, 2048))
    for layer in cache.layers:
        if layer.layer_type == "full_attention":
            seen = layer.length
            for name in ("key", "value"):
                filled = getattr(layer.state, name)[:, :, :seen]
                setattr(layer.state, name, filled.repeat(1, 1, -(-length // seen), 1)[:, :, :length].contiguous())
        if layer.layer_type.endswith("attention"):
            layer.state.length.fill_(length)
        layer.length = length
    return cache


def decode(model: Any, cache: sdm.SDMCache, tokens: int = 8) -> Callable[[], object]:
    """A few tokens, different ones each time: the same token would find its slots in the cache of the processor."""

    @torch.no_grad()
    def run() -> None:
        for ids in torch.randint(0, VOCABULARY, (tokens, cache.batch_size, 1)):
            model(ids, past_key_values=cache)

    return run


def bench_decode() -> None:
    models = {kind: hybrid(kind) for kind in ("sdm", "gdn", "full_attention")}
    streams = {
        "sdm, 1k": ("sdm", 1024, 1),
        "sdm, 32k": ("sdm", 32_768, 1),
        "sdm, 128k": ("sdm", 131_072, 1),
        "gdn, 32k": ("gdn", 32_768, 1),
        "full attention, 32k": ("full_attention", 32_768, 1),
    }
    for batch in STREAMS:
        streams[f"sdm, 32k, {batch} streams"] = ("sdm", 32_768, batch)
        streams[f"full attention, 32k, {batch} streams"] = ("full_attention", 32_768, batch)
    candidates = {}
    for label, (kind, length, batch) in streams.items():
        # The streams of a batch have read the same tokens: only their number matters for the time.
        cache = behind(models[kind], length)
        cache.batch_repeat_interleave(batch)
        candidates[label] = decode(models[kind], cache)
    times = {label: seconds / 8 for label, seconds in time_interleaved(candidates, seconds=20).items()}
    ratios = [
        Ratio("decode, SDM at 128k / at 1k", times["sdm, 128k"] / times["sdm, 1k"], 1.1),
        Ratio("decode at 32k, SDM / full attention", times["sdm, 32k"] / times["full attention, 32k"], 1 / 6),
        *(
            Ratio(
                f"decode at 32k, SDM / full attention, {batch} streams",
                times[f"sdm, 32k, {batch} streams"] / times[f"full attention, 32k, {batch} streams"],
                1 / 6,
            )
            for batch in STREAMS
        ),
        Ratio("decode, SDM / GDN", times["sdm, 32k"] / times["gdn, 32k"], 1.1),
    ]
    report("hybrid_models_decode", ratios, times, {"times": "per token and step of all streams"})


class PeerDeltaNet(GatedDeltaNet):
    """GDN on the PyTorch rule of transformers, which scales queries by itself."""

    def _rule(self, *tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        query, key, value, beta, log_decay = tokens
        return torch_chunk_gated_delta_rule(query * self.key_dim**0.5, key, value, log_decay, beta)


def training_step(model: Any, ids: Tensor) -> Callable[[], object]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids).loss.backward()

    return run


def bench_train() -> None:
    models = {"sdm": hybrid("sdm"), "gdn": hybrid("gdn"), "gdn, transformers": hybrid("gdn")}
    models["gdn, transformers"].model.layers[3].mixer.__class__ = PeerDeltaNet
    ids = torch.randint(0, VOCABULARY, (1, 2048))
    with torch.no_grad():
        logits = [models[name](ids, use_cache=False).logits for name in ("gdn", "gdn, transformers")]
    check_close("the two GDN hybrids", *logits, 1e-3)
    times = time_interleaved({name: training_step(model, ids) for name, model in models.items()}, seconds=80)
    ratios = [
        Ratio("training step, SDM / GDN on transformers' op", times["sdm"] / times["gdn, transformers"], 0.95),
        Ratio("training step, SDM / GDN on our op", times["sdm"] / times["gdn"], 1.15),
    ]
    report("hybrid_models_train", ratios, times, {"tokens": 2048})


def bench_prefill() -> None:
    models = {kind: hybrid(kind) for kind in ("sdm", "full_attention")}

    def prefill(model: Any) -> Callable[[], object]:
        return lambda: read(model, 16_384, chunk=16_384)

    times = time_interleaved({kind: prefill(model) for kind, model in models.items()}, seconds=20)
    ratio = Ratio("prefill of 16k tokens, SDM / full attention", times["sdm"] / times["full_attention"], 0.5)
    report("hybrid_models_prefill", [ratio], times)


def print_peak(kind: str) -> None:
    """Prints the peak of this process: what the model needs before it reads, and after 64k tokens."""
    model = hybrid(kind)
    before = peak_memory()
    cache = read(model, 65_536)
    print(json.dumps({"model": before, "peak": peak_memory(), "cache": cache.nbytes}))


def bench_memory() -> None:
    peaks = {}
    for kind in ("sdm", "full_attention"):
        command = [sys.executable, __file__, "peak", kind]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks[kind] = json.loads(printed.splitlines()[-1])
    value = peaks["sdm"]["peak"] / peaks["full_attention"]["peak"]
    ratio = Ratio("peak memory of a 64k prefill, SDM / full attention", value, 1.0)
    report("hybrid_models_memory", [ratio], {}, {"bytes": peaks})


BENCHMARKS = {"decode": bench_decode, "train": bench_train, "prefill": bench_prefill, "memory": bench_memory}

if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        print_peak(sys.argv[2])
    else:
        for name in sys.argv[1:] or BENCHMARKS:
            torch.manual_seed(0)
            BENCHMARKS[name]()
