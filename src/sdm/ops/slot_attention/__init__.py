"""Slot attention, the rule of Raven: tokens are written into a few of M slots, and a softmax reads all of them.

Shapes: B batch, T time, H heads, M slots, K key size, D value channels, S sequences (batch rows or documents).
"""

from __future__ import annotations

from torch import Tensor

from sdm.ops.backends import BACKENDS, serve
from sdm.ops.sequences import Call, serve_rule
from sdm.ops.slot_attention.chunked import CHUNKED
from sdm.ops.slot_attention.inputs import Tokens, check_step, start
from sdm.ops.slot_attention.reference import REFERENCE

__all__ = ["slot_attention", "slot_attention_step_"]

BACKENDS["slot_attention"] = [CHUNKED, REFERENCE]


def slot_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Run slot attention over a sequence. For each head, with slots S of keys and values, one token after the other:

        S[i] <- exp(log_decay[i]) S[i] + (1 - exp(log_decay[i])) (key, value)      for each slot i
        y     = sum_i softmax_i(S_key[i] . query) S_value[i]                       after the write

    A slot with log_decay 0 keeps what it holds; one with -inf is overwritten. The softmax is over all slots and has no
    scale: a caller who wants one scales the queries.

    Args:
        query, key: `[B,T,H,K]`.
        value: `[B,T,H,D]`.
        log_decay: `[B,T,H,M]`, at most 0.
        initial_state: `[H,M,K+D]` shared by all sequences, or `[S,H,M,K+D]`, keys before values; None is zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: `[S+1]` offsets of documents packed into one row (B = 1): 0 first, T last, none decreasing. Each
            document starts from its own initial state.
        backend: "auto", "reference" or "chunked".

    Returns:
        y: `[B,T,H,D]` in the dtype of value.
        final_state: `[S,H,M,K+D]` in the widest dtype of the inputs, at least float32; or None.
    """
    tokens = Tokens(query, key, value, log_decay)
    state = start(tokens, initial_state, cu_seqlens)
    call = Call(tokens, state, log_decay.shape[-1], cu_seqlens, output_final_state)
    return serve_rule("slot_attention", backend, call)


def slot_attention_step_(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, *, backend: str = "auto"
) -> Tensor:
    """One token of `slot_attention`, shapes without T; `state` [B,H,M,K+D] is updated in place. Returns y [B,H,D].

    For decoding: it records no gradients. A bfloat16 or float16 state is rounded after each write, the arithmetic is
    in float32.
    """
    token = Tokens(query, key, value, log_decay)
    check_step(state, token)
    y: Tensor = serve("slot_attention", backend, Call(token, state, log_decay.shape[-1]))
    return y.to(value.dtype)
