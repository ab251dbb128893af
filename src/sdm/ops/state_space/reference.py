"""The state-space rule, token by token: the specification that every other backend is compared with.

Shapes: B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sdm.ops.checks import check_decay, document_bounds
from sdm.ops.gated_delta_rule.inputs import Tokens


def state_space_reference(tokens: Tokens, initial_state: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Floats in one dtype, initial_state [S,H,K,D]. Returns the output [B,T,H,D] and the final state [S,H,K,D]."""
    check_decay(tokens.log_decay)
    if cu_seqlens is None:
        return _run(tokens, initial_state)
    documents = [
        _run(Tokens(*(x[:, start:end] for x in tokens)), initial_state[s : s + 1])
        for s, (start, end) in enumerate(itertools.pairwise(document_bounds(cu_seqlens, tokens.value.shape[1])))
    ]
    outputs, states = zip(*documents, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(states)


def _run(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(tokens.value.shape[1]):
        y, state = step(Tokens(*(x[:, t] for x in tokens)), state)
        outputs.append(y)
    # A call without tokens must not hand back the caller's own tensor.
    return (torch.stack(outputs, dim=1), state) if outputs else (tokens.value.clone(), state.clone())


def step(token: Tokens, state_BHKD: Tensor) -> tuple[Tensor, Tensor]:
    """One token: its output [B,H,D] and the state after it."""
    written_BHKD = token.key.unsqueeze(-1) * (token.beta.unsqueeze(-1) * token.value).unsqueeze(2)
    state_BHKD = token.log_decay.exp()[..., None, None] * state_BHKD + written_BHKD
    return (token.query.unsqueeze(-1) * state_BHKD).sum(2), state_BHKD
