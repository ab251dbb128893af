"""The gated delta rule, token by token: the specification that every other backend is compared with.

Shapes: B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sdm.ops.backends import Backend
from sdm.ops.checks import check_decay
from sdm.ops.gated_delta_rule.inputs import Tokens
from sdm.ops.sequences import Call, run_documents

Step = Callable[[Tokens, Tensor], tuple[Tensor, Tensor]]


def step(token: Tokens, state_BHKD: Tensor) -> tuple[Tensor, Tensor]:
    """One token: its output [B,H,D] and the state after it."""
    decay = token.log_decay.exp().unsqueeze(-1)
    decayed_BHKD = (decay if token.log_decay.dim() == token.key.dim() else decay.unsqueeze(-1)) * state_BHKD
    retrieved_BHD = (token.key.unsqueeze(-1) * decayed_BHKD).sum(2)
    delta_BHD = token.beta.unsqueeze(-1) * (token.value - retrieved_BHD)
    state_BHKD = decayed_BHKD + token.key.unsqueeze(-1) * delta_BHD.unsqueeze(2)
    return (token.query.unsqueeze(-1) * state_BHKD).sum(2), state_BHKD


def run_tokens(step: Step, call: Call) -> tuple[Tensor, Tensor]:
    """Token after token, each taking the state before it to its output and the state after it."""
    tokens, initial_state = call.in_full()
    check_decay(tokens.log_decay)

    def run(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(tokens.value.shape[1]):
            y, state = step(Tokens(*(x[:, t] for x in tokens)), state)
            outputs.append(y)
        # A call without tokens must not hand back the caller's own tensor.
        return (torch.stack(outputs, dim=1), state) if outputs else (tokens.value.clone(), state.clone())

    return run_documents(run, tokens, initial_state, call.cu_seqlens)


def gated_delta_rule_reference(call: Call) -> tuple[Tensor, Tensor]:
    """Serve a call token by token, as the equations say."""
    return run_tokens(step, call)


def gated_delta_step_reference_(call: Call) -> Tensor:
    """Serve a single step as the equations say; the state changes in place."""
    assert call.state is not None
    check_decay(call.tokens.log_decay)
    y, after = step(call.tokens.to(call.dtype), call.state.to(call.dtype))
    call.state.copy_(after)
    return y


REFERENCE = Backend("reference", gated_delta_rule_reference, gated_delta_step_reference_, onnx=True)
