"""The sparse delta rule on GPUs: a fixed number of launches, whatever the length. README.md tells how."""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.ops.backends import no_forward_mode
from sdm.ops.sequences import Call
from sdm.ops.sparse_delta_rule.triton import ops as ops
from sdm.ops.sparse_delta_rule.triton.layout import LONGEST, power
from sdm.ops.triton.backend import TritonBackend

# How many units of rounding a row of the memory may take up in backward, relative to its size, before it is kept
# instead of recovered by inversion; see the README of this op.
ROUNDING_LIMIT = 192.0
# Backward keeps at most one of so many old rows at a time; a sequence that needs more is run again from its start.
SHARE = 8
# What NVIDIA GPUs need to convert to and from 8-bit floats.
FP8_CAPABILITY = (8, 9)


def sparse_delta_rule_triton(
    call: Call,
    rounding_limit: float = ROUNDING_LIMIT,
    share: int = SHARE,
    kind: str = "planned",
) -> tuple[Tensor, Tensor]:
    """Serve a call over a sequence. The options after `share` are the paper's, to be compared with.

    Args:
        call: the call.
        rounding_limit: units of rounding that a row may take up in backward before it is kept.
        share: backward keeps one in so many old rows at most.
        kind: "bf16", "fp8" or "int4": backward keeps all old rows in that format.
    """
    if kind == "fp8" and call.device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(call.device)
        if capability < FP8_CAPABILITY:
            raise ValueError(
                f'kind "fp8" needs a GPU of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer, '
                f'{call.device} has {capability[0]}.{capability[1]}; use "planned", "bf16" or "int4"'
            )
    inputs = [x for x in (*call.tokens, call.state) if x is not None]
    track = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    y, final_state, _ = torch.ops.sdm.sparse_delta_rule_triton(
        *call.tokens,
        call.state,
        call.rows,
        call.cu_seqlens,
        call.update == "slot",
        call.output_final_state,
        track,
        rounding_limit,
        share,
        kind,
    )
    return y, final_state


def sparse_delta_step_triton_(call: Call) -> Tensor:
    """Serve one token in place by one kernel."""
    y: Tensor = torch.ops.sdm.sparse_delta_step_triton_(call.state, *call.tokens, call.update == "slot")
    return y


def sparse_delta_rule_triton_(call: Call) -> Tensor:
    """Update the state in place: the kernels of a whole sequence on the caller's own table."""
    y: Tensor = torch.ops.sdm.sparse_delta_rule_triton_(call.state, *call.tokens, call.update == "slot")
    return y


def _unsupported_reason(call: Call) -> str | None:
    if call.dtype == torch.float64 and call.device.type != "cpu":
        return "its kernels compute in float32, got torch.float64"
    accesses = power(call.tokens.write_index.shape[-1]) + power(call.tokens.read_index.shape[-1])
    if accesses > LONGEST:
        return f"its kernels sort up to {LONGEST} writes and reads of a token at once, fewer than W and R need"
    changes = call.single_step or call.in_place
    if changes and call.state is not None and not call.state.is_contiguous():
        return f"it changes contiguous states, got strides {call.state.stride()}"
    return None if changes else no_forward_mode(call)


TRITON = TritonBackend(
    sparse_delta_rule_triton,
    sparse_delta_step_triton_,
    unsupported_call=_unsupported_reason,
    run_=sparse_delta_rule_triton_,
)
