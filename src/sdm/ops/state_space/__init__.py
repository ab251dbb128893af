"""The state-space rule of Mamba2 (SSD): the gated delta rule without the delta, writing whatever is there already.

Shapes: B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents).
"""

from __future__ import annotations

from torch import Tensor

from sdm.ops.backends import choose_backend
from sdm.ops.checks import check_decay, check_float, check_no_gradients, check_shape, check_tensor, compute_dtype
from sdm.ops.gated_delta_rule.inputs import Tokens, check_shapes, check_state
from sdm.ops.state_space.chunked import state_space_chunked
from sdm.ops.state_space.reference import state_space_reference

__all__ = ["state_space", "state_space_step_"]

_BACKENDS = {"reference": state_space_reference, "chunked": state_space_chunked}
SUPPORTED = tuple(_BACKENDS)


def state_space(
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
    """Run the state-space rule over a sequence. For each head, with M the state [K,D] and one token after the other:

        M <- exp(log_decay) M + beta key value^T
        y  = M^T query

    In the letters of SSD, query is C, key is B, value is x, beta is the time step Δ, log_decay is Δ A and M is the
    transpose of h. Its skip connection D x is the layer's.

    Args:
        query, key: `[B,T,H,K]`.
        value: `[B,T,H,D]`.
        beta: `[B,T,H]`.
        log_decay: `[B,T,H]`, at most 0.
        initial_state: `[H,K,D]` shared by all sequences, or `[S,H,K,D]`; None is zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: `[S+1]` offsets of documents packed into one row (B = 1): 0 first, T last, none decreasing. Each
            document starts from its own initial state.
        backend: "auto", "reference" or "chunked".

    Returns:
        y: `[B,T,H,D]` in the dtype of value.
        final_state: `[S,H,K,D]` in the widest dtype of the inputs, at least float32; or None.
    """
    tokens = Tokens(query, key, value, beta, log_decay)
    check_shapes(tokens)
    sequences = check_state(tokens, initial_state, cu_seqlens)
    dtype = compute_dtype(*tokens, initial_state)
    run = _BACKENDS[choose_backend(backend, value.device, dtype, SUPPORTED)]
    if initial_state is None:
        initial_state = value.new_zeros(key.shape[2:] + value.shape[-1:], dtype=dtype)
    shape = (sequences, *initial_state.shape[-3:])
    y, final_state = run(tokens.to(dtype), initial_state.to(dtype).expand(shape), cu_seqlens)
    return y.to(value.dtype), final_state if output_final_state else None


def state_space_step_(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor
) -> Tensor:
    """One token of `state_space`, shapes without T; `state` [B,H,K,D] is updated in place. Returns y [B,H,D].

    For decoding: it records no gradients. A bfloat16 or float16 state is rounded after each write, the arithmetic is
    in float32.
    """
    token = Tokens(query, key, value, beta, log_decay)
    check_shapes(token, time="")
    check_tensor("state", state, value.device)
    check_float("state", state)
    check_shape("state", state, (*key.shape, value.shape[-1]), "[B,H,K,D]")
    check_no_gradients("state_space_step_", "state_space", state, *token)
    check_decay(log_decay)
    dtype = compute_dtype(*token, state)
    query, key, written, beta, log_decay = token.to(dtype)
    memory = state.to(dtype)  # the state itself, unless it is in 16 bits
    memory.mul_(log_decay.exp()[..., None, None])
    memory.addcmul_(key.unsqueeze(-1), (beta.unsqueeze(-1) * written).unsqueeze(-2))
    if memory is not state:
        state.copy_(memory)
    return (query.unsqueeze(-2) @ memory).squeeze(-2).to(value.dtype)
