"""Slot attention, chunk by chunk in plain PyTorch.

With S0 the state at the start of a chunk, c_t[i] the log decay of slot i accumulated from there to token t, L[t,s,i]
that from s to t, and w_s[i] = 1 - exp(log_decay_s[i]),

    S_t[i]      = exp(c_t[i]) S0[i] + sum_{s <= t} exp(L[t,s,i]) w_s[i] (k_s, v_s)
    score_t[i]  = exp(c_t[i]) (S0_key[i] . q_t) + sum_{s <= t} exp(L[t,s,i]) w_s[i] (q_t . k_s)
    y_t         = sum_i p_t[i] exp(c_t[i]) S0_value[i] + sum_{s <= t} (sum_i p_t[i] exp(L[t,s,i]) w_s[i]) v_s

where p_t is the softmax of score_t. The state is linear in S0, so that what a chunk adds is found for all chunks at
once and only S0 is handed from chunk to chunk; the readings of all chunks follow.

Shapes: B batch, T time, H heads, M slots, K key size, D value channels, G chunks of C tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sdm.ops.backends import Backend
from sdm.ops.checks import check_decay, has_values
from sdm.ops.sequences import Call, ChannelDecay, PackedChunks, carry_states
from sdm.ops.slot_attention.inputs import Tokens
from sdm.ops.slot_attention.reference import slot_attention_reference, slot_attention_step_reference_

CHUNK = 64


def slot_attention_chunked(call: Call, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Serve a call in plain PyTorch, `chunk` tokens at a time.

    Products of whole matrices spread an infinity or NaN to tokens that never meet it: such a call runs token by token.
    """
    tokens, initial_state = call.in_full()
    check_decay(tokens.log_decay)

    time = tokens.value.shape[1]
    if time == 0 or tokens.value.numel() == 0:
        return tokens.value.clone(), initial_state.clone()
    chunk = min(chunk, time)
    if call.cu_seqlens is None:
        y, state = _run_chunks(tokens, initial_state, None, chunk)
        y = y[:, :time]
    else:
        documents = PackedChunks.of(call.cu_seqlens, time, chunk, tokens.value.device)
        y, state = _run_chunks(documents.pad(tokens), initial_state, documents.chunks, chunk)
        y = y[:, documents.slot]
    if has_values(y) and not bool((y.detach().sum() + state.detach().sum()).isfinite()):
        return slot_attention_reference(call)
    return y, state


CHUNKED = Backend("chunked", slot_attention_chunked, slot_attention_step_reference_)


def _run_chunks(tokens: Tokens, initial: Tensor, chunks: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """The output [B,G*C,H,D], padding included, and the final states; chunks as in `carry_states`."""
    time = tokens.value.shape[1]
    groups = -(-time // chunk)
    # Padding tokens have log_decay = 0: they leave the state as it is.
    query, key, value, log_decay = (
        F.pad(x.movedim(2, 1), (0, 0, 0, groups * chunk - time)).unflatten(2, (groups, chunk)) for x in tokens
    )
    decays, write = ChannelDecay(log_decay), -torch.expm1(log_decay)
    added = (write * decays.to_end).transpose(-1, -2) @ torch.cat((key, value), dim=-1)
    kept = decays.since_start[..., -1, :].unsqueeze(-1)
    starts, state = carry_states(kept, added, initial, chunks)
    start_key, start_value = starts.split((key.shape[-1], value.shape[-1]), dim=-1)
    scores = decays.since_start * (query @ start_key.transpose(-1, -2))
    weight = (scores + decays.sums(query @ key.transpose(-1, -2), write)).softmax(-1)
    y = (weight * decays.since_start) @ start_value + decays.pairs(weight, write) @ value
    return y.flatten(2, 3).movedim(1, 2), state
