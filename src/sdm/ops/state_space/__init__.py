"""The state-space rule of Mamba2 (SSD): the gated delta rule without the delta, writing whatever is there already.

Shapes: B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents).
"""

from __future__ import annotations

from torch import Tensor

from sdm.ops.backends import BACKENDS, serve
from sdm.ops.gated_delta_rule.inputs import Tokens, check_state, check_step
from sdm.ops.sequences import Call, serve_rule
from sdm.ops.state_space.chunked import CHUNKED
from sdm.ops.state_space.reference import REFERENCE

__all__ = ["state_space", "state_space_step_"]

BACKENDS["state_space"] = [CHUNKED, REFERENCE]


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

    The arguments are those of `gated_delta_rule`, which says more about them, and so are the results, but for
    log_decay, which is `[B,T,H]`. The backends are "reference" and "chunked".
    """
    tokens = Tokens(query, key, value, beta, log_decay)
    check_state(tokens, initial_state, cu_seqlens, by_channel=False)
    return serve_rule(
        "state_space", backend, Call(tokens, initial_state, key.shape[-1], cu_seqlens, output_final_state)
    )


def state_space_step_(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor, *, backend: str = "auto"
) -> Tensor:
    """One token of `state_space`, shapes without T; `state` [B,H,K,D] is updated in place. Returns y [B,H,D].

    For decoding: it records no gradients. A bfloat16 or float16 state is rounded after each write, the arithmetic is
    in float32.
    """
    token = Tokens(query, key, value, beta, log_decay)
    check_step(state, token, "state_space_step_", "state_space", by_channel=False)
    y: Tensor = serve("state_space", backend, Call(token, state, key.shape[-1]))
    return y.to(value.dtype)
