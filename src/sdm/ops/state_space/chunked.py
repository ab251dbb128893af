"""The state-space rule, chunk by chunk in plain PyTorch.

With M0 the state at the start of a chunk, c_t the decay accumulated from there to token t and L[t,s] that from s to t,

    M_t = exp(c_t) M0 + sum_{s <= t} exp(L[t,s]) beta_s k_s v_s^T
    y_t = exp(c_t) M0^T q_t + sum_{s <= t} exp(L[t,s]) (q_t . k_s) beta_s v_s

What a chunk adds by itself is found for all chunks at once. Only M0 is handed from chunk to chunk.

Shapes: B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents), G chunks of
C tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sdm.ops.backends import Backend
from sdm.ops.checks import check_decay, document_bounds
from sdm.ops.gated_delta_rule.chunked import chunks_of_documents, segment_sums
from sdm.ops.gated_delta_rule.inputs import Tokens
from sdm.ops.sequences import Call
from sdm.ops.state_space.reference import state_space_step_reference_

CHUNK = 64


def state_space_chunked(call: Call, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Serve a call in plain PyTorch, `chunk` tokens at a time."""
    tokens, initial_state = call.in_full()
    check_decay(tokens.log_decay)
    time = tokens.value.shape[1]
    chunk = min(chunk, max(time, 1))
    if call.cu_seqlens is None:
        y, state = _run(tokens, [initial_state], [-(-time // chunk)], chunk)
        return y[:, :time], state
    place, chunks = chunks_of_documents(document_bounds(call.cu_seqlens, time), chunk, tokens.value.device)
    # One row of zeros at the end serves every place that fills up a document's last chunk.
    padded = Tokens(*(torch.cat((x, x.new_zeros(1, 1, *x.shape[2:])), dim=1)[:, place] for x in tokens))
    y, state = _run(padded, list(initial_state.split(1)), chunks, chunk)
    return y.new_zeros(1, time + 1, *y.shape[2:]).index_copy(1, place, y)[:, :time], state


CHUNKED = Backend("chunked", state_space_chunked, state_space_step_reference_, onnx=True)


def _run(tokens: Tokens, states: list[Tensor], chunks: list[int], chunk: int) -> tuple[Tensor, Tensor]:
    """Sequences one behind the other, of which sequence i has chunks[i] chunks and starts from states[i] [B,H,K,D].

    Returns the output [B, G*C, H, D], padding included, and the final states, one after the other in the batch
    dimension.
    """
    # Padding tokens have beta = 0 and log_decay = 0: they leave the state as it is.
    groups = sum(chunks)
    short = groups * chunk - tokens.value.shape[1]
    query, key, value, beta, log_decay = (
        F.pad(x.movedim(2, 1), (0, 0) * (x.dim() - 3) + (0, short)).unflatten(2, (groups, chunk)) for x in tokens
    )
    if groups == 0:
        return tokens.value.clone(), torch.cat(states).clone()
    value = value * beta.unsqueeze(-1)
    decay_CC = segment_sums(log_decay).exp()
    since_start = log_decay.cumsum(-1).exp().unsqueeze(-1)
    added_BHGKD = (key * decay_CC[..., -1, :].unsqueeze(-1)).transpose(-1, -2) @ value

    starts, finals = [], []
    additions = zip(since_start[..., -1:, :].unbind(2), added_BHGKD.unbind(2), strict=True)
    for count, state in zip(chunks, states, strict=True):
        for _ in range(count):
            starts.append(state)
            decay, added = next(additions)
            state = decay * state + added
        finals.append(state)
    y = (query @ key.transpose(-1, -2) * decay_CC) @ value + (query * since_start) @ torch.stack(starts, dim=2)
    return y.flatten(2, 3).movedim(1, 2), torch.cat(finals)
