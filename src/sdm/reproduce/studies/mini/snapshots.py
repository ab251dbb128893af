"""How exact backward is for each way to keep old rows.

    TRITON_INTERPRET=1 python -m sdm.reproduce.studies.mini.snapshots FILE

The kernels are run by Triton's interpreter and compared with the reference in float64.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdm.files import write_json
from sdm.ops.sequences import Call
from sdm.ops.sparse_delta_rule import sparse_delta_rule
from sdm.ops.sparse_delta_rule.inputs import Tokens

KINDS = {"planned": 4.0, "bf16": 2.0, "fp8": 1.0, "int4": 0.5}  # bytes of a number
TIME, SLOTS, CHANNELS, KEYS = 128, 64, 16, 8


def random_tokens(seed: int = 0) -> tuple[Tokens, Tensor]:
    """Gates as they are at the start of training, distinct slots, and a memory that is not empty; in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def slots() -> Tensor:
        return torch.rand(1, TIME, 1, SLOTS, generator=generator).topk(KEYS).indices.sort().values

    tokens = Tokens(
        slots(),
        normal(1, TIME, 1, KEYS).softmax(-1),
        normal(1, TIME, 1, CHANNELS),
        normal(1, TIME, 1).sigmoid(),
        -0.1 * normal(1, TIME, 1).exp(),
        slots(),
        normal(1, TIME, 1, KEYS).softmax(-1),
    )
    return tokens, normal(1, SLOTS, CHANNELS)


def gradients(tokens: Tokens, state: Tensor, dtype: torch.dtype, kind: str | None) -> list[Tensor]:
    """Of every float, through the output and the final state; `kind` None: by the reference."""
    from sdm.ops.sparse_delta_rule.triton import sparse_delta_rule_triton

    inputs = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in (*tokens, state)]
    if kind is None:
        y, final = sparse_delta_rule(*inputs[:7], initial_state=inputs[7], output_final_state=True, backend="reference")
    else:
        y, final = sparse_delta_rule_triton(Call(Tokens(*inputs[:7]), inputs[7], SLOTS), kind=kind)
    assert final is not None
    weight = torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)
    loss = (y * weight).sum() + final.square().mean()
    return list(torch.autograd.grad(loss, [x for x in inputs if x.requires_grad]))


def measure() -> dict[str, Any]:
    tokens, state = random_tokens()
    expected = gradients(tokens, state, torch.float64, None)
    kinds = {}
    for kind, size in KINDS.items():
        found = gradients(tokens, state, torch.float32, kind)
        error = max(
            float((one.double() - wanted).norm() / wanted.norm()) for one, wanted in zip(found, expected, strict=True)
        )
        # All old rows; or of planned inversion at most one in eight, at a time.
        rows = TIME * KEYS // (8 if kind == "planned" else 1)
        kinds[kind] = {"error": error, "bytes": round(rows * CHANNELS * size)}
    sizes = f"T = {TIME}, N = {SLOTS}, D = {CHANNELS}, W = R = {KEYS}"
    problem = f"{sizes}; relative error in the norm against float64, the largest of all gradients."
    return {"kinds": kinds, "problem": problem}


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), measure())
