"""Slot attention, token by token: the specification that the other backend is compared with.

Shapes: B batch, T time, H heads, M slots, K key size, D value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.ops.backends import Backend
from sdm.ops.checks import check_decay
from sdm.ops.sequences import Call, run_documents
from sdm.ops.slot_attention.inputs import Tokens


def step(token: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: its output [B,H,D] and the state [B,H,M,K+D] after it."""
    log_decay = token.log_decay.unsqueeze(-1)
    written = torch.cat((token.key, token.value), dim=-1).unsqueeze(-2)
    state = log_decay.exp() * state - torch.expm1(log_decay) * written
    keys, values = state.split((token.key.shape[-1], token.value.shape[-1]), dim=-1)
    weight = (keys * token.query.unsqueeze(-2)).sum(-1).softmax(-1)
    return (weight.unsqueeze(-1) * values).sum(-2), state


def slot_attention_reference(call: Call) -> tuple[Tensor, Tensor]:
    """Serve a call token by token, as the equations say."""
    tokens, initial_state = call.in_full()
    check_decay(tokens.log_decay)

    def run(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(tokens.value.shape[1]):
            y, state = step(Tokens(*(x[:, t] for x in tokens)), state)
            outputs.append(y)
        return (torch.stack(outputs, dim=1), state) if outputs else (tokens.value.clone(), state.clone())

    return run_documents(run, tokens, initial_state, call.cu_seqlens)


def slot_attention_step_reference_(call: Call) -> Tensor:
    """Serve a single step as the equations say; the state changes in place."""
    assert call.state is not None
    check_decay(call.tokens.log_decay)
    y, after = step(call.tokens.to(call.dtype), call.state.to(call.dtype))
    call.state.copy_(after)
    return y


REFERENCE = Backend("reference", slot_attention_reference, slot_attention_step_reference_, onnx=True)
