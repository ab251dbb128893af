"""The sparse delta rule, token by token: the specification that every other backend is compared with.

Shapes: B batch, T time, H heads, W writes, R reads, N slots, D value channels, S sequences (batch rows or documents).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sdm.ops.checks import document_bounds
from sdm.ops.sparse_delta_rule.inputs import Tokens, check_values


def written_rows(state_BHND: Tensor, token: Tokens, update: str) -> tuple[Tensor, Tensor]:
    """The written slots, as an index [B,H,W,D] for gather and scatter, and their rows after the write."""
    slot_BHWD = _rows_of(token.write_index, state_BHND)
    log_decay_BHW = token.log_decay if token.log_decay.dim() == 3 else token.log_decay.unsqueeze(-1)
    decayed_BHWD = log_decay_BHW.exp().unsqueeze(-1) * state_BHND.gather(2, slot_BHWD)
    weight_BHW1, value_BH1D = token.write_weight.unsqueeze(-1), token.value.unsqueeze(2)
    beta_BH11 = token.beta[..., None, None]
    if update == "delta":
        retrieved_BH1D = (weight_BHW1 * decayed_BHWD).sum(2, keepdim=True)
        return slot_BHWD, decayed_BHWD + weight_BHW1 * (beta_BH11 * (value_BH1D - retrieved_BH1D))
    return slot_BHWD, decayed_BHWD + weight_BHW1 * (beta_BH11 * (value_BH1D - decayed_BHWD))


def read(state_BHND: Tensor, token: Tokens) -> Tensor:
    """The weighted sum of the read slots, [B,H,D]."""
    rows_BHRD = state_BHND.gather(2, _rows_of(token.read_index, state_BHND))
    return (token.read_weight.unsqueeze(-1) * rows_BHRD).sum(2)


def _rows_of(index_BHW: Tensor, state_BHND: Tensor) -> Tensor:
    return index_BHW.long().unsqueeze(-1).expand(*index_BHW.shape, state_BHND.shape[-1])


def sparse_delta_rule_reference(
    tokens: Tokens, initial_state: Tensor, cu_seqlens: Tensor | None, update: str
) -> tuple[Tensor, Tensor]:
    """Floats in one dtype, initial_state [S,H,N,D]. Returns the output [B,T,H,D] and the final state [S,H,N,D]."""
    check_values(tokens, initial_state.shape[2])
    if cu_seqlens is None:
        return _run(tokens, initial_state, update)
    bounds = document_bounds(cu_seqlens, tokens.value.shape[1])
    documents = [
        _run(Tokens(*(x[:, start:end] for x in tokens)), initial_state[s : s + 1], update)
        for s, (start, end) in enumerate(itertools.pairwise(bounds))
    ]
    outputs, states = zip(*documents, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(states)


def _run(tokens: Tokens, state: Tensor, update: str) -> tuple[Tensor, Tensor]:
    state = state.clone()
    outputs = []
    for t in range(tokens.value.shape[1]):
        token = Tokens(*(x[:, t] for x in tokens))
        state = state.scatter(2, *written_rows(state, token, update))
        outputs.append(read(state, token))
    return torch.stack(outputs, dim=1) if outputs else tokens.value.clone(), state


def sparse_delta_step_reference_(state: Tensor, token: Tokens, update: str) -> Tensor:
    """One token; the state [B,H,N,D] changes in place and keeps its dtype, the arithmetic is that of the token."""
    check_values(token, state.shape[2])
    dtype = token.value.dtype
    slot_BHWD = _rows_of(token.write_index, state)
    # Only the touched rows are read and written: a step must not cost the size of the memory.
    rows_BHWD = state.gather(2, slot_BHWD).to(dtype)
    local = token._replace(
        write_index=torch.arange(slot_BHWD.shape[2], device=state.device).expand_as(token.write_index)
    )
    state.scatter_(2, slot_BHWD, written_rows(rows_BHWD, local, update)[1].to(state.dtype))
    read_BHRD = state.gather(2, _rows_of(token.read_index, state)).to(dtype)
    return (token.read_weight.unsqueeze(-1) * read_BHRD).sum(2)
