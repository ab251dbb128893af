"""The sparse delta rule, token by token: the specification that every other backend is compared with.

Shapes: B batch, T time, H heads, W writes, R reads, N slots, D value channels, S sequences (batch rows or documents).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.ops.backends import Backend
from sdm.ops.sequences import Call, run_documents
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


def sparse_delta_rule_reference(call: Call) -> tuple[Tensor, Tensor]:
    """Serve a call token by token, as the equations say."""
    tokens, initial_state = call.in_full()
    check_values(tokens, call.rows)

    def run(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state.clone()
        outputs = []
        for t in range(tokens.value.shape[1]):
            token = Tokens(*(x[:, t] for x in tokens))
            state = state.scatter(2, *written_rows(state, token, call.update))
            outputs.append(read(state, token))
        return torch.stack(outputs, dim=1) if outputs else tokens.value.clone(), state

    return run_documents(run, tokens, initial_state, call.cu_seqlens)


def sparse_delta_step_reference_(call: Call) -> Tensor:
    """Serve a single step as the equations say; the state changes in place."""
    token, state, dtype = call.tokens.to(call.dtype), call.state, call.dtype
    assert state is not None
    check_values(token, call.rows)
    slot_BHWD = _rows_of(token.write_index, state)
    # Only the touched rows are read and written: a step must not cost the size of the memory.
    rows_BHWD = state.gather(2, slot_BHWD).to(dtype)
    local = token._replace(
        write_index=torch.arange(slot_BHWD.shape[2], device=state.device).expand_as(token.write_index)
    )
    state.scatter_(2, slot_BHWD, written_rows(rows_BHWD, local, call.update)[1].to(state.dtype))
    read_BHRD = state.gather(2, _rows_of(token.read_index, state)).to(dtype)
    return (token.read_weight.unsqueeze(-1) * read_BHRD).sum(2)


def sparse_delta_rule_reference_(call: Call) -> Tensor:
    """Update the state in place, a step at a time."""
    # All tokens are checked before the first of them changes the state.
    check_values(call.tokens, call.rows)
    outputs = []
    for t in range(call.tokens.value.shape[1]):
        step = Call(Tokens(*(x[:, t] for x in call.tokens)), call.state, call.rows, update=call.update)
        outputs.append(sparse_delta_step_reference_(step))
    return torch.stack(outputs, dim=1) if outputs else call.tokens.value.to(call.dtype)


REFERENCE = Backend(
    "reference", sparse_delta_rule_reference, sparse_delta_step_reference_, run_=sparse_delta_rule_reference_, onnx=True
)
