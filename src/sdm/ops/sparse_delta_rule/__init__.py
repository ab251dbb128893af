"""The gated delta rule on a memory of which each token writes W slots and reads R. Derived in the README."""

from __future__ import annotations

from torch import Tensor

from sdm.ops.backends import BACKENDS, serve
from sdm.ops.checks import check_no_gradients, check_tensor
from sdm.ops.sequences import Call, serve_rule
from sdm.ops.sparse_delta_rule.chunked import CHUNKED
from sdm.ops.sparse_delta_rule.inputs import UPDATES, Tokens, check_shapes
from sdm.ops.sparse_delta_rule.native import NATIVE, take_usual_step_, usual_step
from sdm.ops.sparse_delta_rule.reference import REFERENCE
from sdm.ops.sparse_delta_rule.triton import TRITON

__all__ = ["sparse_delta_rule", "sparse_delta_rule_", "sparse_delta_step_"]

BACKENDS["sparse_delta_rule"] = [NATIVE, TRITON, CHUNKED, REFERENCE]


def sparse_delta_rule(
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    *,
    initial_state: Tensor | None = None,
    num_slots: int | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    update: str = "delta",
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Write and read a memory of N slots, token after token.

    For each sequence and head, with k, q the weights, g the log decay, v the value, at every token::

        decayed[i] = exp(g) * M[i]                    for the W written slots i; the others stay as they are
        delta      = beta * (v - sum_i k_i decayed[i])
        M[i]       = decayed[i] + k_i * delta         for the W written slots
        y          = sum_j q_j * M[j]                 over the R read slots, after the write

    Args:
        write_index: [B,T,H,W] integers in [0, N), distinct within a token.
        write_weight: [B,T,H,W], k.
        value: [B,T,H,D], v.
        beta: [B,T,H], usually in [0, 1].
        log_decay: [B,T,H], at most 0; or [B,T,H,W], one per write.
        read_index: [B,T,H,R] integers in [0, N).
        read_weight: [B,T,H,R], q.
        initial_state: [H,N,D], shared by the batch, or [B,H,N,D] (one per document with cu_seqlens). None is zeros.
        num_slots: N; needed when there is no initial state.
        output_final_state: return the memory after the last token; it is differentiable.
        cu_seqlens: [documents + 1] offsets of documents packed into one row (B = 1). Each starts from the initial
            state and has a final state of its own.
        update: "delta" as above, or "slot": M[i] = decayed[i] + beta k_i (v - decayed[i]), each slot by itself.
        backend: "auto", or one of `sdm.ops.available_backends()`; a backend that cannot serve the call raises.

    Returns:
        y [B,T,H,D] in value's dtype, and the final state [B or documents,H,N,D], or None. State and arithmetic are in
        the widest dtype of the inputs and at least float32.
    """
    tokens = Tokens(write_index, write_weight, value, beta, log_decay, read_index, read_weight)
    num_slots = check_shapes(tokens, initial_state, num_slots, cu_seqlens, update)
    call = Call(tokens, initial_state, num_slots, cu_seqlens, output_final_state, update)
    return serve_rule("sparse_delta_rule", backend, call)


def sparse_delta_rule_(
    state: Tensor,
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    *,
    update: str = "delta",
    backend: str = "auto",
) -> Tensor:
    """Write and read a memory as `sparse_delta_rule` does, and update it in place.

    For prefill in pieces and for verifying drafted tokens: only the touched rows are read and written. It records no
    gradients. On CPUs T tokens at once give the same bits as T calls of `sparse_delta_step_`.

    Args:
        state: [B,H,N,D], contiguous. A bfloat16 or float16 state is rounded after each write, or on GPUs after the
            last token; the arithmetic is in float32.
        write_index: [B,T,H,W], and so on: as in `sparse_delta_rule`.
        update: "delta" or "slot".
        backend: "auto", or one of `sdm.ops.available_backends()`.

    Returns:
        y [B,T,H,D] in value's dtype.
    """
    tokens = Tokens(write_index, write_weight, value, beta, log_decay, read_index, read_weight)
    check_tensor("state", state)
    if state.dim() != 4:
        raise ValueError(f"state must be [B,H,N,D], got shape {list(state.shape)}")
    num_slots = check_shapes(tokens, state, None, None, update, in_place=True)
    check_no_gradients("sparse_delta_rule_", "sparse_delta_rule", state, *tokens)
    y: Tensor = serve("sparse_delta_rule", backend, Call(tokens, state, num_slots, update=update, in_place=True))
    return y.to(value.dtype)


def sparse_delta_step_(
    state: Tensor,
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    *,
    update: str = "delta",
    backend: str = "auto",
) -> Tensor:
    """Write and read one token, shapes without T; `state` [B,H,N,D] is updated in place. Returns y [B,H,D].

    For decoding: one token of `sparse_delta_rule_`. It records no gradients. A bfloat16 or float16 state is rounded
    after each write, the arithmetic is in float32.
    """
    tokens = Tokens(write_index, write_weight, value, beta, log_decay, read_index, read_weight)
    # Decoding takes such steps by the million: the kernel takes less time than to ask which backend serves it.
    native = backend in ("auto", "native") and BACKENDS["sparse_delta_rule"][0] is NATIVE and not NATIVE.missing
    if native and update in UPDATES and usual_step(state, tokens):
        return take_usual_step_(state, tokens, update == "slot")
    check_tensor("state", state)
    if state.dim() != 4:
        raise ValueError(f"state must be [B,H,N,D], got shape {list(state.shape)}")
    num_slots = check_shapes(tokens, state, None, None, update, single_step=True)
    check_no_gradients("sparse_delta_step_", "sparse_delta_rule", state, *tokens)
    y: Tensor = serve("sparse_delta_rule", backend, Call(tokens, state, num_slots, update=update))
    return y.to(value.dtype)
