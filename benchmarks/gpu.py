"""For people who have a GPU: are the kernels right there, and how fast are they?

python -m benchmarks.gpu [--output gpu.json] [--levels 1 8] [--batches 1 8 16]

Correctness first: every backend against the reference, outputs, final states and gradients, in the layouts that models
use, with uniform, Zipf and product-key slots, packed and in bfloat16; the decode step; the gated delta rule;
sliding-window attention against a CPU. Nothing is timed if that fails. Then times of the sparse delta rule and its
decode step at the sizes of the paper's ladder, packed and in bfloat16 too: beside what the latency model says, and as
ratios to flash-linear-attention's gated delta rule (if installed) and to PyTorch's attention. A decode and a training
step are captured in a CUDA graph. Everything goes into a JSON file that you can send in.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks._triton_cases import ACCESSES, DTYPES, draw_slots
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdm
from sdm import ops
from sdm.models.cost import LEVELS
from sdm.ops.triton.availability import description
from sdm.plan.kernel_time import GPUS, MemoryCall

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Of the largest difference to the reference, relative to the largest number."""
SLOTS = ("uniform", "zipf", "product keys")


@dataclass(frozen=True)
class Case:
    """A call whose results are compared with the reference."""

    batch: int = 2
    time: int = 70
    heads: int = 2
    slots: int = 100
    channels: int = 24
    accesses: int = 12
    drawn: str = "uniform"
    update: str = "delta"
    dtype: torch.dtype = torch.float32
    documents: tuple[int, ...] | None = None


SMALL = [Case(), Case(update="slot"), Case(batch=1, documents=(0, 9, 9, 70))]
# The layouts that models use: fewest, few and many programs, slots that tokens of a chunk share, packing, bfloat16.
SHIPPED = [
    Case(batch, 40, 1, 4096, 256, 64, drawn, update, dtype, documents)
    for batch, drawn, update, dtype, documents in (
        (1, "uniform", "delta", torch.float32, None),
        (1, "zipf", "slot", torch.float32, None),
        (8, "zipf", "delta", torch.float32, None),
        (16, "uniform", "delta", torch.float32, None),
        (16, "zipf", "delta", torch.float32, None),
        (16, "product keys", "delta", torch.float32, None),
        (16, "zipf", "delta", torch.bfloat16, None),
        (1, "zipf", "delta", torch.float32, (0, 7, 7, 30, 40)),
    )
]


def draw(lead: tuple[int, ...], accesses: int, slots: int, drawn: str, generator: torch.Generator) -> Tensor:
    """Distinct, sorted slots [*lead, accesses].

    Uniform, by Zipf's law, or the best product keys of queries that change little from token to token, as a layer's do.
    """
    if drawn != "product keys":
        return draw_slots(lead, accesses, slots, drawn == "zipf", generator)
    n = math.isqrt(slots)
    scores = torch.randn(*lead, 2 * n, generator=generator).cumsum(1) if len(lead) == 3 else torch.randn(*lead, 2 * n)
    return ops.product_key_topk(scores, accesses)[1].sort(-1).values


def tokens_of(
    lead: tuple[int, ...], slots: int, channels: int, accesses: int, device: str, grad: bool,
    drawn: str = "uniform", dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    """Random tokens in the order of the op. Made on the CPU, so that every device gets the same."""
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        return torch.rand(*lead, *shape, generator=generator)

    write, read = (draw(lead, accesses, slots, drawn, generator) for _ in range(2))
    made = [write, floats(accesses).softmax(-1), floats(channels).to(dtype), floats(), -0.3 * floats()]
    made += [read, floats(accesses).softmax(-1)]
    return [x.to(device).requires_grad_(grad and x.is_floating_point()) for x in made]


def difference(case: Case, device: str, backend: str) -> float:
    """The largest relative difference to the reference in float32, over output, final state and gradients."""
    results = []
    for name in ("reference", backend):
        lead = (case.batch, case.time, case.heads)
        tokens = tokens_of(lead, case.slots, case.channels, case.accesses, device, True, case.drawn, case.dtype)
        size = case.heads * case.slots * case.channels
        table = torch.linspace(-1, 1, size).view(case.heads, case.slots, case.channels).to(device).requires_grad_()
        y, final = ops.sparse_delta_rule(
            *tokens,
            initial_state=table,
            output_final_state=True,
            cu_seqlens=None if case.documents is None else torch.tensor(case.documents, device=device),
            update=case.update,
            backend=name,
        )
        assert final is not None
        leaves = [x for x in (*tokens, table) if x.requires_grad]
        gradients = torch.autograd.grad((y.float().sin().sum() + final.cos().sum()), leaves)
        results.append([y.detach(), final.detach(), *gradients])
    return max(
        float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-20))
        for wanted, got in zip(*results, strict=True)
    )


def step_difference(case: Case, device: str, backend: str) -> float:
    """The largest relative difference of a decode step to the reference, over output and state."""
    lead, results = (case.batch, case.heads), []
    for name in ("reference", backend):
        tokens = tokens_of(lead, case.slots, case.channels, case.accesses, device, False, case.drawn, case.dtype)
        size = math.prod(lead) * case.slots * case.channels
        state = torch.linspace(-1, 1, size).view(*lead, case.slots, case.channels).to(device, case.dtype)
        y = ops.sparse_delta_step_(state, *tokens, update=case.update, backend=name)
        results.append([y, state])
    return max(
        float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())
        for wanted, got in zip(*results, strict=True)
    )


def correctness(device: str, backends: list[str], cases: list[Case]) -> dict[str, float]:
    """The largest difference of each backend to the reference, as a multiple of what is tolerated."""
    worst = dict.fromkeys(backends, 0.0)
    for backend in backends:
        for case in cases:
            error = max(difference(case, device, backend), step_difference(case, device, backend))
            worst[backend] = max(worst[backend], error / TOLERANCE[case.dtype])
        for n, k in ((48, 40), (192, 64)):
            scores = torch.randn(50, 2 * n, generator=torch.Generator().manual_seed(0)).to(device)
            wanted, selected = (ops.product_key_topk(scores, k, backend=name)[1] for name in ("reference", backend))
            if not torch.equal(wanted, selected):
                worst[backend] = float("inf")
        for documents in (None, (0, 20, 20, 150)):
            error = gated_difference(device, backend, documents)
            worst[backend] = max(worst[backend], error / TOLERANCE[torch.float32])
    worst["window attention"] = attention_difference(device) / TOLERANCE[torch.float32]
    return worst


def gated_difference(device: str, backend: str, documents: tuple[int, ...] | None) -> float:
    """The largest relative difference of the gated delta rule to its reference, gradients included."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((64,), (64,), (48,), (), ())
    query, key, value, beta, decay = (torch.randn(1, 150, 2, *x, generator=generator).to(device) for x in shapes)
    inputs = [F.normalize(query, dim=-1), F.normalize(key, dim=-1), value, beta.sigmoid(), -0.2 * decay.abs()]
    results = []
    for name in ("reference", backend):
        leaves = [x.detach().requires_grad_() for x in inputs]
        bounds = None if documents is None else torch.tensor(documents, device=device)
        y, final = ops.gated_delta_rule(*leaves, cu_seqlens=bounds, output_final_state=True, backend=name)
        assert final is not None
        results.append([y, final, *torch.autograd.grad(y.sin().sum() + final.cos().sum(), leaves)])
    return max(
        float((got - wanted).detach().abs().max() / wanted.detach().abs().max())
        for wanted, got in zip(*results, strict=True)
    )


def attention_difference(device: str) -> float:
    """The largest difference of sliding-window attention to the same layer on a CPU, with the gradient of its input."""
    torch.manual_seed(0)
    layer, x = sdm.layers.SlidingWindowAttention(256, 4, window=100), torch.randn(1, 700, 256)
    bounds, results = torch.tensor([0, 300, 300, 700]), []
    for place in ("cpu", device):
        layer, own = layer.to(place), x.to(place).detach().requires_grad_()
        y = layer(own, cu_seqlens=bounds.to(place))
        results.append([y.cpu().detach(), torch.autograd.grad(y.sin().sum(), own)[0].cpu()])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))


def seconds(run: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Median time of a call, by events of the GPU or, without one, by the clock."""
    run()
    if device == "cpu":
        from time import perf_counter

        times = []
        for _ in range(repeats):
            before = perf_counter()
            run()
            times.append(perf_counter() - before)
        return statistics.median(times)
    module = getattr(torch, device)
    times = []
    for _ in range(repeats):
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        module.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def decode_seconds(device: str, backend: str, sizes: dict[str, Any]) -> float:
    """Median time of a decode step of every sequence."""
    heads, channels, slots = sizes["heads"], sizes["width"] // sizes["heads"], sizes["slots"]
    state = torch.zeros(sizes["batch"], heads, slots, channels, device=device)
    token = tokens_of((sizes["batch"], heads), slots, channels, sizes["accesses"], device, False)
    return seconds(lambda: ops.sparse_delta_step_(state, *token, backend=backend), device)


def both_ways(run: Callable[[], Tensor], leaves: list[Tensor]) -> dict[str, Callable[[], object]]:
    def forward() -> None:
        with torch.no_grad():
            run()

    def training() -> None:
        torch.autograd.grad(run().sum(), leaves)

    return {"forward": forward, "forward + backward": training}


def candidates(
    width: int, heads: int, slots: int, time: int, accesses: int, device: str, backend: str, batch: int, drawn: str,
    dtype: str = "float32", documents: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """The memory at this width, and what it is compared with, in bfloat16 but for the memory.

    Documents are packed into one row of the memory; the others have the row as it is.
    """
    tokens = tokens_of((batch, time, heads), slots, width // heads, accesses, device, True, drawn, DTYPES[dtype])
    bounds = torch.linspace(0, time, documents + 1).round().to(device, torch.int64) if documents else None
    table = torch.zeros(heads, slots, width // heads, device=device, requires_grad=True)
    leaves = [x for x in (*tokens, table) if x.requires_grad]
    rule = partial(ops.sparse_delta_rule, *tokens, initial_state=table, cu_seqlens=bounds, backend=backend)
    found = {"sdm": both_ways(lambda: rule()[0], leaves)}
    half = torch.bfloat16 if device != "cpu" else torch.float32
    size = min(128, width)
    query, key, value = (
        torch.randn(batch, max(width // size, 1), time, size, device=device, dtype=half, requires_grad=True)
        for _ in range(3)
    )
    attention = lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)  # noqa: E731
    found["sdpa"] = both_ways(attention, [query, key, value])
    if device == "cuda" and torch.version.hip is None:

        def cudnn() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return attention()

        found["sdpa, cuDNN"] = both_ways(cudnn, [query, key, value])
    for kernels in ("fla", "triton") if device == "cuda" else ():
        if kernels == "fla" and not find_spec("fla"):
            continue
        lead = (batch, time, width // 128)
        dense = [torch.randn(*lead, x, device=device, dtype=half) for x in (64, 64, 128)]
        dense[:2] = [F.normalize(x, dim=-1) for x in dense[:2]]
        gates = [torch.rand(*lead, device=device), -torch.rand(*lead, device=device)]
        inputs = [x.requires_grad_() for x in (*dense, *gates)]
        call = partial(ops.gated_delta_rule, *inputs, backend=kernels)
        found[f"{kernels} gated delta rule"] = both_ways(lambda call=call: call()[0], inputs)
    return found


def modelled(device: str, sizes: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of forward and backward by the latency model, from the least to the most, if it knows the GPU."""
    gpu = next((gpu for name, gpu in GPUS.items() if name in device), None)
    if gpu is None:
        return {}
    call = MemoryCall(sizes["batch"], sizes["time"], sizes["heads"], sizes["width"] // sizes["heads"])
    return {name: [x.low, x.high] for name, x in zip(("forward", "backward"), call.seconds(gpu), strict=True)}


def ratios(device: str, backend: str, **sizes: Any) -> dict[str, Any]:
    """Times of forward, training and decoding at these sizes, beside those of other ops. What fails says why."""
    result: dict[str, Any] = {"sizes": sizes, "decode step": decode_seconds(device, backend, sizes)}
    if device == "cuda" and sizes["accesses"] == ACCESSES:
        result["modelled"] = modelled(torch.cuda.get_device_name(), sizes)
    peers = candidates(device=device, backend=backend, **sizes)
    for way in ("forward", "forward + backward"):
        times, failed = {}, {}
        for name, ways in peers.items():
            try:
                times[name] = seconds(ways[way], device, 3 if device == "cpu" else 10)
            except Exception as error:  # another op's failure is its own
                if name == "sdm":
                    raise
                failed[name] = f"{type(error).__name__}: {error}"
        result[way + ", failed"] = failed
        result[way] = {"seconds": times, "sdm / other": {x: times["sdm"] / times[x] for x in times if x != "sdm"}}
    return result


def graphs() -> dict[str, str]:
    """Whether a decode step and a training step can be captured in a CUDA graph, and give the same numbers."""
    outcome = {}
    for name in ("decode step", "training step"):
        try:
            outcome[name] = _captured(name)
        except Exception as error:  # whatever the driver has to say goes into the report
            outcome[name] = f"{type(error).__name__}: {error}"
    return outcome


def _captured(name: str) -> str:
    torch.manual_seed(0)
    layer = sdm.SparseDeltaMemory(256, num_slots=1024, num_writes=16, num_reads=16, backend="triton").cuda()
    x = torch.randn(1, 64, 256, device="cuda", requires_grad=True)
    _, state = layer(x, return_state=True)
    outputs: list[Tensor] = []

    def run() -> None:
        if name == "decode step":
            with torch.no_grad():
                outputs[:] = [layer.step_(x[:, 0], state)]
        else:
            outputs[:] = list(torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()]))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    if name == "decode step":  # the state moves on; that the replay runs is what is asked
        graph.replay()
        torch.cuda.synchronize()
        return "captured" if bool(outputs[0].isfinite().all()) else "captured, but not finite"
    graph.replay()
    replayed = [x.clone() for x in outputs]
    run()
    same = all(torch.equal(a, b) for a, b in zip(replayed, outputs, strict=True))
    return "captured, same numbers" if same else "captured, other numbers"


def environment(device: str) -> dict[str, Any]:
    gpu = getattr(torch, device).get_device_name() if device != "cpu" else platform.processor()
    return {
        "device": gpu,
        "torch": torch.__version__,
        "triton": description(),
        "sdm": sdm.__version__,
        **{name: bool(find_spec(name)) for name in ("fla", "flash_qla")},
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "hip": torch.version.hip,
    }


def report(device: str, backends: list[str], levels: list[dict[str, Any]], cases: list[Case]) -> dict[str, Any]:
    """Everything; `ratios` and `graphs` are left out where the numbers are wrong."""
    result: dict[str, Any] = {"environment": environment(device)}
    result["difference / tolerance"] = correctness(device, backends, cases)
    result["right"] = all(x <= 1 for x in result["difference / tolerance"].values())
    if result["right"]:
        result["ratios"] = [ratios(device, backends[0], **sizes) for sizes in levels]
        if device == "cuda":
            result["graphs"] = graphs()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 8], choices=sorted(LEVELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--time", type=int, default=2048, help="tokens of a sequence")
    options = parser.parse_args()
    device = next((kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()), None)
    if device is None:
        print("there is no GPU here that torch can use: this needs one (see docs/performance.md for what needs none)")
        return 2
    levels: list[dict[str, Any]] = []
    for level in options.levels:
        width, heads = LEVELS[level].hidden_size, LEVELS[level].num_memory_heads
        sizes = {"width": width, "heads": heads, "slots": (width // (4 * heads)) ** 2}
        sizes |= {"time": options.time, "accesses": ACCESSES}
        one = {**sizes, "batch": 1, "drawn": SLOTS[0]}
        levels += [{**one, "dtype": "bfloat16"}, {**one, "documents": 12}]
        for batch in options.batches:
            levels += [{**sizes, "batch": batch, "drawn": drawn} for drawn in (SLOTS if batch == 1 else SLOTS[:1])]
    result = report(device, ["triton", "chunked"], levels, SMALL + SHIPPED)
    options.output.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    print(f"wrote {options.output}")
    return 0 if result["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
