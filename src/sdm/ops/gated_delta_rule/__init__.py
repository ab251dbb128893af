"""The gated delta rule, the dense rule of Gated DeltaNet: the sparse rule with every slot written and read.

Shapes: B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents).
"""

from __future__ import annotations

from torch import Tensor

from sdm.ops.backends import BACKENDS, serve
from sdm.ops.gated_delta_rule.chunked import CHUNKED
from sdm.ops.gated_delta_rule.fla import FLA
from sdm.ops.gated_delta_rule.inputs import Tokens, check_state, check_step
from sdm.ops.gated_delta_rule.native import NATIVE
from sdm.ops.gated_delta_rule.reference import REFERENCE
from sdm.ops.gated_delta_rule.triton import TRITON
from sdm.ops.sequences import Call, serve_rule

__all__ = ["gated_delta_rule", "gated_delta_step_"]

BACKENDS["gated_delta_rule"] = [NATIVE, FLA, TRITON, CHUNKED, REFERENCE]


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule over a sequence. For each head, with M the state [K,D] and one token after the other:

        M     <- exp(log_decay) M          a decay for all of M, or for each of its K rows
        delta  = beta (value - M^T key)
        M     <- M + key delta^T
        y      = M^T query

    Nothing is scaled or normalised inside: a caller who wants unit keys, or queries times K^-0.5, does it first.

    Args:
        query: `[B,T,H,K]`.
        key: `[B,T,H,K]`.
        value: `[B,T,H,D]`.
        beta: `[B,T,H]`, in [0, 1] as a rule.
        log_decay: `[B,T,H]`, or `[B,T,H,K]` for a decay of each key channel (Kimi Delta Attention); at most 0.
        initial_state: `[H,K,D]` shared by all sequences, or `[S,H,K,D]`; None is zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: `[S+1]` offsets of documents packed into one row (B = 1): 0 first, T last, none decreasing. Each
            document starts from its own initial state.
        backend: "auto", "reference", "chunked", "native" (C++, CPU), "fla" (flash-linear-attention, on GPUs, for
            values of 16 bits and one decay per head) or "triton" (GPUs, in float32, where K is at most 256).

    Returns:
        y: `[B,T,H,D]` in the dtype of value.
        final_state: `[S,H,K,D]` in the widest dtype of the inputs, at least float32; or None.
    """
    tokens = Tokens(query, key, value, beta, log_decay)
    check_state(tokens, initial_state, cu_seqlens)
    return serve_rule(
        "gated_delta_rule", backend, Call(tokens, initial_state, key.shape[-1], cu_seqlens, output_final_state)
    )


def gated_delta_step_(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor, *, backend: str = "auto"
) -> Tensor:
    """One token of `gated_delta_rule`, shapes without T; `state` [B,H,K,D] is updated in place. Returns y [B,H,D].

    For decoding: it records no gradients. A bfloat16 or float16 state is rounded after each write, the arithmetic is
    in float32.
    """
    token = Tokens(query, key, value, beta, log_decay)
    check_step(state, token)
    y: Tensor = serve("gated_delta_rule", backend, Call(token, state, key.shape[-1]))
    return y.to(value.dtype)
