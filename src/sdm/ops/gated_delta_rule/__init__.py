"""The gated delta rule, the dense rule of Gated DeltaNet: the sparse rule with every slot written and read.

Shapes: B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents).
"""

from __future__ import annotations

from torch import Tensor

from sdm.ops.backends import choose_backend
from sdm.ops.checks import check_decay, compute_dtype
from sdm.ops.gated_delta_rule.chunked import gated_delta_rule_chunked
from sdm.ops.gated_delta_rule.inputs import Tokens, check_shapes, check_state, check_step
from sdm.ops.gated_delta_rule.native import gated_delta_rule_native, gated_delta_step_native_
from sdm.ops.gated_delta_rule.reference import gated_delta_rule_reference, step

__all__ = ["gated_delta_rule", "gated_delta_step_"]

_BACKENDS = {
    "reference": gated_delta_rule_reference,
    "chunked": gated_delta_rule_chunked,
    "native": gated_delta_rule_native,
}


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

        M     <- exp(log_decay) M
        delta  = beta (value - M^T key)
        M     <- M + key delta^T
        y      = M^T query

    Nothing is scaled or normalised inside: a caller who wants unit keys, or queries times K^-0.5, does it first.

    Args:
        query, key: `[B,T,H,K]`.
        value: `[B,T,H,D]`.
        beta: `[B,T,H]`, in [0, 1] as a rule.
        log_decay: `[B,T,H]`, at most 0.
        initial_state: `[H,K,D]` shared by all sequences, or `[S,H,K,D]`; None is zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: `[S+1]` offsets of documents packed into one row (B = 1): 0 first, T last, none decreasing. Each
            document starts from its own initial state.
        backend: "auto", "reference", "chunked" or "native".

    Returns:
        y: `[B,T,H,D]` in the dtype of value.
        final_state: `[S,H,K,D]` in the widest dtype of the inputs, at least float32; or None.
    """
    tokens = Tokens(query, key, value, beta, log_decay)
    check_shapes(tokens)
    sequences = check_state(tokens, initial_state, cu_seqlens)
    dtype = compute_dtype(*tokens, initial_state)
    run = _BACKENDS[choose_backend(backend, value.device, dtype, tuple(_BACKENDS))]
    if initial_state is None:
        initial_state = value.new_zeros(key.shape[2:] + value.shape[-1:], dtype=dtype)
    if initial_state.dim() == 3:
        initial_state = initial_state.expand(sequences, *initial_state.shape)
    y, final_state = run(tokens.to(dtype), initial_state.to(dtype), cu_seqlens)
    return y.to(value.dtype), final_state if output_final_state else None


def gated_delta_step_(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor
) -> Tensor:
    """One token of `gated_delta_rule`, shapes without T; `state` [B,H,K,D] is updated in place. Returns y [B,H,D].

    For decoding: it records no gradients. A bfloat16 or float16 state is rounded after each write, the arithmetic is
    in float32.
    """
    token = Tokens(query, key, value, beta, log_decay)
    check_step(state, token)
    dtype = compute_dtype(*token, state)
    native = choose_backend("auto", value.device, dtype, tuple(_BACKENDS)) == "native"
    if native and state.dtype == dtype and state.is_contiguous():
        return gated_delta_step_native_(state, token.to(dtype)).to(value.dtype)
    check_decay(log_decay)
    y, after = step(token.to(dtype), state.to(dtype))
    state.copy_(after)
    return y.to(value.dtype)
