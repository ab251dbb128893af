"""The gated delta rule on a memory of which each token writes W slots and reads R. Derived in the README."""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.native import core
from sdm.ops.backends import choose_backend, in_forward_mode, say_once
from sdm.ops.checks import check_no_gradients, check_tensor, compute_dtype
from sdm.ops.sparse_delta_rule.chunked import sparse_delta_rule_chunked
from sdm.ops.sparse_delta_rule.inputs import UPDATES, Tokens, check_shapes
from sdm.ops.sparse_delta_rule.native import (
    sparse_delta_rule_native,
    sparse_delta_step_native_,
    take_usual_step_,
    usual_step,
)
from sdm.ops.sparse_delta_rule.reference import sparse_delta_rule_reference, sparse_delta_step_reference_

__all__ = ["sparse_delta_rule", "sparse_delta_step_"]

_BACKENDS = {"reference": sparse_delta_rule_reference, "chunked": sparse_delta_rule_chunked}
_NATIVE_STATES = {torch.float32: (torch.float32, torch.bfloat16), torch.float64: (torch.float64,)}


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
    dtype = compute_dtype(*tokens, initial_state)
    chosen = choose_backend(backend, value.device, dtype, (*_BACKENDS, "native"))
    if chosen == "native":
        y, final_state = sparse_delta_rule_native(
            tokens.floats_to(dtype), initial_state, num_slots, cu_seqlens, update, output_final_state
        )
        return y.to(value.dtype), final_state if output_final_state else None

    if chosen == "chunked" and in_forward_mode():
        raise NotImplementedError('only backend="reference" has forward-mode derivatives (torch.func.jvp)')
    run = _BACKENDS[chosen]
    sequences = value.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    shape = (sequences, value.shape[2], num_slots, value.shape[3])
    if initial_state is None:
        initial_state = torch.zeros((), dtype=dtype, device=value.device)
    y, final_state = run(tokens.floats_to(dtype), initial_state.to(dtype).expand(shape), cu_seqlens, update)
    return y.to(value.dtype), final_state if output_final_state else None


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
) -> Tensor:
    """One token of `sparse_delta_rule`, shapes without T; `state` [B,H,N,D] is updated in place. Returns y [B,H,D].

    For decoding: it records no gradients. A bfloat16 or float16 state is rounded after each write, the arithmetic is
    in float32.
    """
    tokens = Tokens(write_index, write_weight, value, beta, log_decay, read_index, read_weight)
    if core is not None and update in UPDATES and usual_step(state, tokens):
        return take_usual_step_(state, tokens, update == "slot")
    check_tensor("state", state)
    if state.dim() != 4:
        raise ValueError(f"state must be [B,H,N,D], got shape {list(state.shape)}")
    check_shapes(tokens, state, None, None, update, single_step=True)
    check_no_gradients("sparse_delta_step_", "sparse_delta_rule", state, *tokens)
    dtype = compute_dtype(*tokens, state)
    native = choose_backend("auto", value.device, dtype) == "native"
    # The core computes in float64 for a float64 state alone.
    if native and state.is_contiguous() and state.dtype in _NATIVE_STATES[dtype]:
        return sparse_delta_step_native_(state, tokens, update)
    if native:
        say_once(
            f"sparse_delta_step_ in plain PyTorch, slower than the compiled core, serves a state of {state.dtype} with "
            f"tokens of {dtype}; the core takes contiguous states of float32, bfloat16 or, with float64 tokens, float64"
        )
    y = sparse_delta_step_reference_(state, tokens.floats_to(dtype), update)
    return y.to(value.dtype)
