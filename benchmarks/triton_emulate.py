"""Runs the compiled kernels in an emulator and compares them with the reference: errors, bounds, races.

python -m benchmarks.triton_emulate [--cases NAME ...] [--targets sm_80 sm_90] [--barriers]

Prints a line of JSON for each case and fails on an error above the tolerance, a race or an access out of bounds. With
`--barriers` the barriers that the kernels ask for are removed in turn, and the line says whether a race was seen then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks._triton_cases import draw_slots
from benchmarks.ptx.emulate import Emulation, emulated
from benchmarks.ptx.program import Program
from torch import Tensor

from sdm import ops
from sdm.ops.sequences import Call
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.ops.sparse_delta_rule.triton import ROUNDING_LIMIT, SHARE, host, layout, sparse_delta_rule_triton

KERNELS = Path(host.__file__).parent
TABLE_PROGRAMS = host.TABLE_PROGRAMS
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LEVEL_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call."""

    B: int = 1
    T: int = 13
    H: int = 1
    W: int = 64
    R: int = 64
    N: int = 512
    D: int = 32
    dtype: torch.dtype = torch.float32
    update: str = "delta"
    per_write: bool = False
    documents: tuple[int, ...] | None = None
    """Bounds of packed documents."""
    decay: float = 0.4
    share: int = SHARE
    kind: str = "planned"
    one_table: bool = False
    """Let packed documents share a table; there is no final state then."""
    layout: str = "few"
    """For the fewest programs, few or many."""
    edges: bool = False
    """Run only the blocks of the first and the last channels, and compare those."""
    tolerance: float = 0.0
    """0: that of the dtype."""


LEVELS = {1: (1, 768), 8: (2, 960), 13: (2, 1920)}
"""H and D. The tables are smaller than those of the levels, and hot: tokens of a chunk share slots."""

CASES: dict[str, Case] = {
    "one block": Case(T=9, N=96, D=8),
    "one block, backward of several warps": Case(T=4, W=256, R=256, N=384, D=8, decay=60.0, share=10**9),
    "one block, packed, one table": Case(T=9, N=96, D=8, documents=(0, 5, 9), one_table=True),
    "W = R = 4": Case(B=2, T=21, H=2, W=4, R=4, N=16, D=6),
    "packed, slot rule": Case(T=22, W=3, R=5, N=11, D=6, update="slot", per_write=True, documents=(0, 3, 3, 22)),
    "W = R = 4, many": Case(B=2, T=21, H=2, W=4, R=4, N=16, D=6, layout="many"),
    "W = R = 64, many": Case(T=13, layout="many"),
    "strong decay, short ring, many": Case(T=9, D=16, decay=60.0, share=10**9, layout="many"),
    "packed, one table": Case(T=22, H=2, W=3, R=5, N=11, D=6, documents=(0, 3, 3, 12, 22), one_table=True),
    "packed, one table, W = R = 64": Case(T=13, D=16, N=128, documents=(0, 4, 4, 5, 13), one_table=True),
    "strong decay, short ring, fewest": Case(T=21, D=16, decay=60.0, share=10**9, layout="fewest"),
    "packed, fewest": Case(T=29, D=16, documents=(0, 11, 11, 12, 29), layout="fewest"),
    "packed, many": Case(T=13, D=16, documents=(0, 4, 4, 5, 13), layout="many"),
    "W = R = 1": Case(T=40, W=1, R=1, N=4, D=4),
    "W = R = 16": Case(B=2, T=19, H=2, W=16, R=16, N=100, D=24),
    "W = 12": Case(T=19, H=2, W=12, R=12, N=100, D=24),
    "W = R = 64": Case(T=21),
    "W = 32, R = 64": Case(W=32),
    "W = 128, R = 32": Case(T=9, W=128, R=32),
    "W = 32, R = 128": Case(T=9, W=32, R=128),
    "strong decay, short ring": Case(T=21, D=16, decay=60.0, share=10**9),
    "packed": Case(T=29, D=16, documents=(0, 11, 11, 12, 29)),
    "slot rule": Case(update="slot", per_write=True),
    "bfloat16": Case(dtype=torch.bfloat16),
    "snapshots in bfloat16": Case(D=16, kind="bf16", tolerance=2e-2),
    "snapshots in int4": Case(D=16, kind="int4", tolerance=0.5),
    **{
        f"level {x}, {name}{suffix}": Case(
            T=21, H=H, N=2048, D=D, edges=True, dtype=dtype, tolerance=LEVEL_TOLERANCE[dtype], layout=name
        )
        for x, (H, D) in LEVELS.items()
        for name in layout.Accesses._fields
        for dtype, suffix in ((torch.float32, ""), (torch.bfloat16, ", bfloat16"))
    },
}
STEPS: dict[str, Case] = {
    "step, level 1": Case(B=2, D=768, N=1024, edges=True),
    "step, bfloat16": Case(B=2, D=96, N=1024, dtype=torch.bfloat16),
    "step, W = 4, R = 64": Case(B=2, W=4, D=32, N=128),
    "step, W = 2, R = 128, slot rule": Case(B=2, W=2, R=128, D=32, N=256, update="slot"),
    "step, W = 64, R = 4, slot rule": Case(B=2, R=4, D=32, N=128, update="slot", per_write=True),
}


def make(case: Case) -> tuple[Tokens, Tensor]:
    """Random inputs: tokens, and an initial table [H,N,D]."""
    generator = torch.Generator().manual_seed(0)
    lead = (case.B, case.T, case.H)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, generator=generator)

    write, read = (draw_slots(lead, count, case.N, True, generator) for count in (case.W, case.R))
    gate = -case.decay * torch.rand(*lead, *((case.W,) if case.per_write else ()), generator=generator)
    value = normal(case.D).to(case.dtype)
    weights = normal(case.W).softmax(-1), normal(case.R).softmax(-1)
    tokens = Tokens(write, weights[0], value, normal().sigmoid(), gate, read, weights[1])
    return tokens, torch.randn(case.H, case.N, case.D, generator=generator).to(case.dtype)


def _both(run: Callable[[Tokens, Tensor], list[Tensor]], tokens: Tokens, table: Tensor) -> dict[str, Tensor]:
    """Output, final state (if the call returns it) and gradients."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in (*tokens, table)]
    outputs = run(Tokens(*leaves[:7]), leaves[7])
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    names = (*Tokens._fields, "initial_state")
    wanted = {name: x for name, x in zip(names, leaves, strict=True) if x.requires_grad}
    given = torch.autograd.grad(outputs, list(wanted.values()), grads)
    named = dict(zip(("y", "final_state"), (x.detach() for x in outputs), strict=False))
    return {**named, **dict(zip(wanted, given, strict=True))}


def _reference(case: Case, tokens: Tokens, table: Tensor, bounds: Tensor | None) -> list[Tensor]:
    """In float64: the token loop, or the compiled core where that would take minutes."""
    y, final = ops.sparse_delta_rule(
        *tokens,
        initial_state=table,
        output_final_state=True,
        cu_seqlens=bounds,
        update=case.update,
        backend="auto" if case.edges else "reference",
    )
    assert final is not None
    return [y] if case.one_table else [y, final]


def _edges(size: int) -> list[int]:
    return sorted({0, size - 1})


def compare(case: Case, target: str, change: Callable[[Program], Program] | None = None) -> tuple[float, Emulation]:
    """The largest error relative to the largest number of each result, and what the emulator saw."""
    tokens, table = make(case)
    bounds = None if case.documents is None else torch.tensor(case.documents)
    # Wide tokens hold the rounded inputs exactly.
    wide = tokens.to(torch.float64), table.double()
    expected = _both(lambda *x: _reference(case, *x, bounds), *wide)

    def run(tokens: Tokens, table: Tensor) -> list[Tensor]:
        call = Call(tokens, table, case.N, bounds, not case.one_table, case.update)
        y, final = sparse_delta_rule_triton(call, ROUNDING_LIMIT, case.share, case.kind)
        return [y] if case.one_table else [y, final]

    only = dict.fromkeys(("forward_kernel", "backward_kernel"), _edges) if case.edges else {}
    host.TABLE_PROGRAMS = 0 if case.one_table else TABLE_PROGRAMS
    with emulated(target, only=only, change=change) as emulation, layout.chosen(case.layout):
        results = _both(run, tokens, table)
    worst = 0.0
    for name, x in expected.items():
        if case.edges:
            if name not in ("y", "value", "initial_state"):
                continue
            # Channels of blocks that did not run hold nothing. The narrowest blocks have 4 channels.
            head = x.dim() - (3 if name == "initial_state" else 2)
            ends = [(y.select(head, 0)[..., :4], y.select(head, case.H - 1)[..., -4:]) for y in (results[name], x)]
            pairs = list(zip(*ends, strict=True))
        else:
            pairs = [(results[name], x)]
        worst = max([worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)])
    return worst, emulation


def compare_step(
    case: Case, target: str, change: Callable[[Program], Program] | None = None
) -> tuple[float, Emulation]:
    """The same for a decode step."""
    tokens, table = make(case)
    state = table.expand(case.B, *table.shape).contiguous()
    token = Tokens(*(x[:, 0] for x in tokens))
    wide_state, wide = state.double(), token.to(torch.float64)
    expected = ops.sparse_delta_step_(wide_state, *wide, update=case.update, backend="reference")
    only = {"step_kernel": _edges} if case.edges else {}
    with emulated(target, only=only, change=change) as emulation:
        y = ops.sparse_delta_step_(state, *token, update=case.update, backend="triton")
    pairs = [(y, expected), (state, wide_state)]
    if case.edges:
        pairs = [(a[0, 0, ..., :4], b[0, 0, ..., :4]) for a, b in pairs] + [(y[-1, -1, -4:], expected[-1, -1, -4:])]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs), emulation


GATED: dict[str, dict[str, Any]] = {
    "gated, K = 64": {"sizes": (1, 70, 1, 64, 20)},
    "gated, by channel, packed, K = 100": {
        "sizes": (1, 40, 1, 100, 16),
        "by_channel": True,
        "documents": (0, 7, 7, 40),
    },
    "gated, short": {"sizes": (2, 5, 1, 3, 5)},
}
"""Calls of the gated delta rule: B, T, H, K, D; decays; bounds of packed documents."""


def compare_gated(
    target: str, sizes: tuple[int, ...], by_channel: bool = False, documents: tuple[int, ...] = ()
) -> tuple[float, Emulation]:
    """The largest relative error of output, final state and gradients of the gated delta rule."""
    generator = torch.Generator().manual_seed(0)
    B, T, H, K, D = sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key = (torch.nn.functional.normalize(normal(B, T, H, K), dim=-1) for _ in range(2))
    decay = -0.2 * normal(B, T, H, *((K,) if by_channel else ())).abs()
    state = normal(max(len(documents) - 1, B), H, K, D)
    inputs = [query, key, normal(B, T, H, D), normal(B, T, H).sigmoid(), decay, state]
    grads = normal(B, T, H, D), normal(*state.shape)
    bounds = torch.tensor(documents) if documents else None

    def run(inputs: list[Tensor], backend: str) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        y, final = ops.gated_delta_rule(
            *leaves[:5], initial_state=leaves[5], output_final_state=True, cu_seqlens=bounds, backend=backend
        )
        assert final is not None
        given = torch.autograd.grad([y, final], leaves, [x.to(y.dtype) for x in grads])
        return [y.detach(), final.detach(), *given]

    with emulated(target) as emulation:
        results = run(inputs, "triton")
    expected = run([x.double() for x in inputs], "reference")
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(results, expected, strict=True)), emulation


def senseless_documents(target: str) -> Emulation:
    """Forward and backward with bounds that no documents have. Raises on an access out of bounds."""
    from sdm.ops.sparse_delta_rule.triton.host import Plan, Problem, backward, forward

    tokens, table = make(Case(T=22, W=4, R=4, N=16, D=6))
    with emulated(target) as emulation:
        for bounds in ([5, 19, 3, 22], [0, -7, 99, 22], [22, 0, 22, 0], [3, 2**40, 1, -(2**40)]):
            problem = Problem(tokens, table, 16, torch.tensor(bounds), False)
            y, final, residual = forward(problem)
            backward(
                problem, Plan(ROUNDING_LIMIT, SHARE, "planned"), residual, torch.ones_like(y), torch.ones_like(final)
            )
    return emulation


def written_barriers() -> set[str]:
    """The source lines of the kernels that ask for a barrier. Triton adds others, where it exchanges data itself."""
    return {
        f"{path.name}:{number}"
        for path in KERNELS.glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "tl.debug_barrier()" in line
    }


def removed_barriers(run: Callable[..., tuple[float, Emulation]]) -> dict[str, bool]:
    """For each barrier that a kernel asks for and that runs: whether a race is seen when it is removed.

    A barrier in which several warps wait for nothing shows no race; nor does one beside another that Triton adds.
    """
    lines: dict[str, None] = {}

    def collect(program: Program) -> Program:
        lines.update(dict.fromkeys(x for x in program.barriers() if x in written_barriers()))
        return program

    run(change=collect)
    seen = {}
    for line in lines:
        _, emulation = run(change=partial(Program.without_barriers, source=line))
        seen[line] = bool(emulation.races.counts)
    return seen


def _report(name: str, target: str, error: float, emulation: Emulation, tolerance: float) -> bool:
    """Print what was seen. Returns whether the case failed."""
    counts = emulation.races.counts.items()
    races = [f"{kind}: {buffer} at {line}, {count}" for (kind, buffer, line), count in counts]
    failed = bool(races) or not error <= tolerance
    ran = {kernel: [x.blocks, x.executed, x.barriers] for kernel, x in emulation.ran.items()}
    report = {"case": name, "target": target, "error": error, "races": races, "failed": failed, "ran": ran}
    print(json.dumps(report), flush=True)
    return failed


def main() -> int:
    """Run the cases; 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *STEPS], default=[*CASES, *STEPS], metavar="NAME")
    parser.add_argument("--targets", nargs="+", default=["sm_80", "sm_90"])
    parser.add_argument("--barriers", action="store_true")
    parser.add_argument(
        "--senseless", action="store_true", help="bounds of documents that make no sense, and nothing else"
    )
    parser.add_argument("--gated", action="store_true", help="the gated delta rule, and nothing else")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("the emulator runs compiled kernels: unset TRITON_INTERPRET")
    # Memory that nobody has written is NaN, or a number far out of bounds.
    torch.use_deterministic_algorithms(True)
    failed = 0
    if options.senseless:
        for target in options.targets:
            print(json.dumps({"senseless": target, "blocks": senseless_documents(target).ran["forward_kernel"].blocks}))
        return 0
    if options.gated:
        for name, call in GATED.items():
            for target in options.targets:
                error, emulation = compare_gated(target, **call)
                failed += _report(name, target, error, emulation, 1e-6)
        return 1 if failed else 0
    for name in options.cases:
        case = CASES.get(name) or STEPS[name]
        for target in options.targets:
            run = partial(compare if name in CASES else compare_step, case, target)
            if options.barriers:
                print(json.dumps({"case": name, "target": target, "barriers": removed_barriers(run)}), flush=True)
                continue
            error, emulation = run()
            failed += _report(name, target, error, emulation, case.tolerance or TOLERANCE[case.dtype])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
