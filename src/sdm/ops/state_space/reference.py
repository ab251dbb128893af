"""The state-space rule, token by token: the specification that every other backend is compared with.

Shapes: B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents).
"""

from __future__ import annotations

from torch import Tensor

from sdm.ops.backends import Backend
from sdm.ops.checks import check_decay
from sdm.ops.gated_delta_rule.inputs import Tokens
from sdm.ops.gated_delta_rule.reference import run_tokens
from sdm.ops.sequences import Call


def step(token: Tokens, state_BHKD: Tensor) -> tuple[Tensor, Tensor]:
    """One token: its output [B,H,D] and the state after it."""
    written_BHKD = token.key.unsqueeze(-1) * (token.beta.unsqueeze(-1) * token.value).unsqueeze(2)
    state_BHKD = token.log_decay.exp()[..., None, None] * state_BHKD + written_BHKD
    return (token.query.unsqueeze(-1) * state_BHKD).sum(2), state_BHKD


def state_space_reference(call: Call) -> tuple[Tensor, Tensor]:
    """Serve a call token by token, as the equations say."""
    return run_tokens(step, call)


def state_space_step_reference_(call: Call) -> Tensor:
    """The same in place, to touch the state no more often than needed."""
    assert call.state is not None
    check_decay(call.tokens.log_decay)
    query, key, value, beta, log_decay = call.tokens.to(call.dtype)
    state = call.state.to(call.dtype)  # the state itself, unless it is in 16 bits
    state.mul_(log_decay.exp()[..., None, None])
    state.addcmul_(key.unsqueeze(-1), (beta.unsqueeze(-1) * value).unsqueeze(-2))
    if state is not call.state:
        call.state.copy_(state)
    return (query.unsqueeze(-2) @ state).squeeze(-2)


REFERENCE = Backend("reference", state_space_reference, state_space_step_reference_, onnx=True)
