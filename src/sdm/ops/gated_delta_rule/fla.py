"""The gated delta rule by the kernel of flash-linear-attention, where that is installed."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from sdm.ops.backends import Backend, no_forward_mode
from sdm.ops.gated_delta_rule.reference import gated_delta_step_reference_
from sdm.ops.sequences import Call


def gated_delta_rule_fla(call: Call) -> tuple[Tensor, Tensor | None]:
    """Serve a call with the kernels of flash-linear-attention."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    query, key, value, beta, log_decay = call.tokens
    y, final_state = chunk_gated_delta_rule(
        query.to(value.dtype),
        key.to(value.dtype),
        value,
        g=log_decay,
        beta=beta,
        scale=1.0,
        initial_state=None if call.state is None else call.in_full()[1].contiguous(),
        output_final_state=call.output_final_state,
        cu_seqlens=call.cu_seqlens,
    )
    return y, final_state


def _unsupported_reason(call: Call) -> str | None:
    dtype = call.tokens.value.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel multiplies in 16 bits and takes values of bfloat16 or float16, got {dtype}"
    if call.tokens.log_decay.dim() == call.tokens.key.dim():
        return "its kernel takes a decay per head, got one per key channel"
    return no_forward_mode(call)


FLA = Backend(
    "fla",
    gated_delta_rule_fla,
    gated_delta_step_reference_,
    "cuda",
    "" if find_spec("fla") else "flash-linear-attention is not installed (pip install flash-linear-attention)",
    _unsupported_reason,
    says_missing=True,
)
