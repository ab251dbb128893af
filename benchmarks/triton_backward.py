"""What backward keeps of old rows in the Triton kernels, and how exact gradients are beside those of snapshots.

python -m benchmarks.triton_backward [--time 512] [--no-table]

W = R = 64 as in the paper, as many slots as tokens, gates of -0.18 on average. Triton's interpreter runs the kernels in
float32; the reference computes in float64. The error is the largest difference of the output or a gradient, relative to
its largest number, over all inputs.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import argparse
from pathlib import Path

import torch
from benchmarks._pages import write_between
from benchmarks._triton_cases import ACCESSES
from torch import Tensor

from sdm import ops
from sdm.ops.sparse_delta_rule.inputs import Tokens

BEGIN, END = "<!-- old rows: made by benchmarks/triton_backward.py -->", "<!-- end of old rows -->"
NAMES = {
    "planned": "planned inversion, float32",
    "bf16": "snapshots in bfloat16",
    "fp8": "snapshots in fp8",
    "int4": "snapshots in int4",
}


def inputs(time: int, channels: int, accesses: int) -> tuple[Tokens, Tensor]:
    """Tokens and an initial table, of random numbers that float32 holds."""
    generator = torch.Generator().manual_seed(0)

    def index() -> Tensor:
        drawn = [torch.randperm(time, generator=generator)[:accesses].sort().values for _ in range(time)]
        return torch.stack(drawn).view(1, time, 1, accesses)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, time, 1, *shape, generator=generator)

    weights = [normal(accesses).softmax(-1) for _ in range(2)]
    gate = -0.36 * torch.rand(1, time, 1, generator=generator)
    tokens = Tokens(index(), weights[0], normal(channels), normal().sigmoid(), gate, index(), weights[1])
    return tokens, torch.randn(1, time, channels, generator=generator) / 50


def reference(tokens: Tokens, table: Tensor, grad_y: Tensor) -> dict[str, Tensor]:
    """Output and gradients in float64."""
    leaves = {name: x.double().requires_grad_() for name, x in tokens._asdict().items() if x.is_floating_point()}
    start = table.double().requires_grad_()
    y, _ = ops.sparse_delta_rule(*tokens._replace(**leaves), initial_state=start, backend="reference")
    leaves["table"] = start
    gradients = torch.autograd.grad(y, list(leaves.values()), grad_y.double())
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


def compare(time: int, channels: int = 8, accesses: int = ACCESSES) -> dict[str, tuple[float, float, float]]:
    """For each way: rows kept, relative to one for each write, the error of the output and that of gradients."""
    from sdm.ops.sparse_delta_rule.triton import ROUNDING_LIMIT, SHARE
    from sdm.ops.sparse_delta_rule.triton.host import Plan, Problem, backward, forward

    tokens, table = inputs(time, channels, accesses)
    grad_y = torch.randn(1, time, 1, channels, generator=torch.Generator().manual_seed(1))
    expected = reference(tokens, table, grad_y)
    problem = Problem(tokens, table, time, None, False)
    y, _, residual = forward(problem)
    found = {}
    for name in NAMES:
        grads = backward(problem, Plan(ROUNDING_LIMIT, SHARE, name), residual, grad_y, None)
        results = {"y": y, **grads._asdict()}
        errors = {
            x: float((results[x].view_as(wanted) - wanted).abs().max() / wanted.abs().max())
            for x, wanted in expected.items()
        }
        kept = float(grads.kept[:, 0, -1].double().mean()) / ((time - 1) * accesses)
        found[name] = kept, errors.pop("y"), max(errors.values())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", type=int, default=512, help="tokens, and slots")
    parser.add_argument("--no-table", action="store_true", help="leave docs/performance.md as it is")
    options = parser.parse_args()
    lines = ["| old rows | kept / (T x W) | error of outputs | error of gradients |", "|---|---:|---:|---:|"]
    for kind, (kept, output, gradients) in compare(options.time).items():
        lines.append(f"| {NAMES[kind]} | {100 * kept:.1f}% | {output:.0e} | {gradients:.0e} |")
    print(*lines, sep="\n")
    if not options.no_table:
        write_between(Path(__file__).parent.parent / "docs" / "performance.md", (BEGIN, END), lines)


if __name__ == "__main__":
    main()
