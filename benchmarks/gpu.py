"""For people who have a GPU: are the kernels right there, and how fast are they?

python -m benchmarks.gpu [--output gpu.json] [--levels 1 8]

Correctness first: every backend against the reference, outputs, final states and gradients; nothing is timed if that
fails. Then times of the sparse delta rule at the sizes of the paper's ladder, as ratios to flash-linear-attention's
gated delta rule (if installed) and to PyTorch's attention, and a decode and a training step captured in a CUDA graph.
Everything goes into a JSON file that you can send in.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sdm
from sdm import ops
from sdm.models.ladder import LEVELS
from sdm.ops.triton.availability import description

TOLERANCE = 1e-4
"""Of the largest difference to the reference, relative to the largest number, in float32."""


def tokens_of(lead: tuple[int, ...], slots: int, channels: int, accesses: int, device: str, grad: bool) -> list[Tensor]:
    """Random tokens in the order of the op. Made on the CPU, so that every device gets the same."""
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        return torch.rand(*lead, *shape, generator=generator)

    def index() -> Tensor:
        # Distinct, sorted, from anywhere: a random start and a random stride for each token.
        start = torch.randint(0, slots, (*lead, 1), generator=generator)
        return ((start + torch.arange(accesses) * max(slots // accesses, 1)) % slots).sort(-1).values

    made = [index(), floats(accesses).softmax(-1), floats(channels), floats(), -0.3 * floats()]
    made += [index(), floats(accesses).softmax(-1)]
    return [x.to(device).requires_grad_(grad and x.is_floating_point()) for x in made]


def correctness(device: str, backends: list[str], time: int = 70) -> dict[str, float]:
    """The largest relative difference of each backend to the reference, over outputs, final states and gradients."""
    worst = dict.fromkeys(backends, 0.0)
    for update in ("delta", "slot"):
        results: dict[str, list[Tensor]] = {}
        for backend in ["reference", *backends]:
            tokens = tokens_of((2, time, 2), 100, 24, 12, device, True)
            table = torch.linspace(-1, 1, 2 * 100 * 24).view(2, 100, 24).to(device).requires_grad_()
            y, final = ops.sparse_delta_rule(
                *tokens, initial_state=table, output_final_state=True, update=update, backend=backend
            )
            assert final is not None
            leaves = [x for x in (*tokens, table) if x.requires_grad]
            gradients = torch.autograd.grad((y.sin().sum() + final.cos().sum()), leaves)
            results[backend] = [y.detach(), final.detach(), *gradients]
        for backend in backends:
            for got, wanted in zip(results[backend], results["reference"], strict=True):
                difference = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-20))
                worst[backend] = max(worst[backend], difference)
    for backend in backends:
        scores = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)).to(device)
        wanted, found = (ops.product_key_topk(scores, 40, backend=name)[1] for name in ("reference", backend))
        if not torch.equal(wanted, found):
            worst[backend] = float("inf")
    return worst


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


def both_ways(run: Callable[[], Tensor], leaves: list[Tensor]) -> dict[str, Callable[[], object]]:
    def forward() -> None:
        with torch.no_grad():
            run()

    def training() -> None:
        torch.autograd.grad(run().sum(), leaves)

    return {"forward": forward, "forward + backward": training}


def candidates(
    width: int, heads: int, slots: int, time: int, accesses: int, device: str, backend: str
) -> dict[str, Any]:
    """The memory at this width, and what it is compared with, all of one sequence in bfloat16 but for the memory."""
    tokens = tokens_of((1, time, heads), slots, width // heads, accesses, device, True)
    table = torch.zeros(heads, slots, width // heads, device=device, requires_grad=True)
    leaves = [x for x in (*tokens, table) if x.requires_grad]
    found = {
        "sdm": both_ways(lambda: ops.sparse_delta_rule(*tokens, initial_state=table, backend=backend)[0], leaves),
    }
    half = torch.bfloat16 if device != "cpu" else torch.float32
    size = min(128, width)
    query, key, value = (
        torch.randn(1, max(width // size, 1), time, size, device=device, dtype=half, requires_grad=True)
        for _ in range(3)
    )
    attention = lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)  # noqa: E731
    found["sdpa"] = both_ways(attention, [query, key, value])
    if find_spec("fla") and device == "cuda":
        dense = [torch.randn(1, time, width // 128, x, device=device, dtype=half) for x in (64, 64, 128)]
        dense[:2] = [F.normalize(x, dim=-1) for x in dense[:2]]
        gates = [torch.rand(1, time, width // 128, device=device), -torch.rand(1, time, width // 128, device=device)]
        inputs = [x.requires_grad_() for x in (*dense, *gates)]
        found["fla gated delta rule"] = both_ways(lambda: ops.gated_delta_rule(*inputs, backend="fla")[0], inputs)
    return found


def ratios(device: str, backend: str, width: int, heads: int, slots: int, time: int, accesses: int) -> dict[str, Any]:
    found = candidates(width, heads, slots, time, accesses, device, backend)
    result: dict[str, Any] = {"sizes": {"d": width, "H": heads, "N": slots, "T": time, "W": accesses, "R": accesses}}
    for way in ("forward", "forward + backward"):
        times = {name: seconds(ways[way], device, 3 if device == "cpu" else 10) for name, ways in found.items()}
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
        "fla": bool(find_spec("fla")),
        "hip": torch.version.hip,
    }


def report(device: str, backends: list[str], levels: list[dict[str, int]]) -> dict[str, Any]:
    """Everything; `ratios` and `graphs` are left out where the numbers are wrong."""
    result: dict[str, Any] = {"environment": environment(device), "differences": correctness(device, backends)}
    result["right"] = all(x <= TOLERANCE for x in result["differences"].values())
    if result["right"]:
        result["ratios"] = [ratios(device, backends[0], **sizes) for sizes in levels]
        if device == "cuda":
            result["graphs"] = graphs()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 8], choices=sorted(LEVELS))
    parser.add_argument("--time", type=int, default=2048, help="tokens of a sequence")
    options = parser.parse_args()
    device = next((kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()), None)
    if device is None:
        print("there is no GPU here that torch can use: this needs one (see docs/performance.md for what needs none)")
        return 2
    levels = []
    for level in options.levels:
        width, heads = LEVELS[level].hidden_size, LEVELS[level].num_memory_heads
        slots = (width // (4 * heads)) ** 2
        levels.append({"width": width, "heads": heads, "slots": slots, "time": options.time, "accesses": 64})
    result = report(device, ["triton", "chunked"], levels)
    options.output.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    print(f"wrote {options.output}")
    return 0 if result["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
