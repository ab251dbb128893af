"""The gated delta rule, chunk by chunk in plain PyTorch.

With M0 the state at the start of a chunk, c_t the decay accumulated from there to token t and L[t,s] that from s to t,

    M_t     = exp(c_t) M0 + sum_{s <= t} exp(L[t,s]) k_s delta_s^T
    delta_t = beta_t (v_t - exp(c_t) M0^T k_t - sum_{s < t} exp(L[t,s]) (k_t . k_s) delta_s)

With a decay per key channel, exp(c_t) and exp(L[t,s]) are diagonal matrices; exp(L[t,s]) (k_t . k_s) stands for the sum
over channels i of exp(L[t,s,i]) k_t[i] k_s[i].

The second line is a unit triangular system (I + A) delta = beta (v - exp(c) K M0). Its solution is affine in M0,
delta = U - W M0, so that U and W of all chunks are found at once and only M0 is handed from chunk to chunk.

Shapes: B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents), G chunks of
C tokens.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from sdm.ops.backends import Backend
from sdm.ops.checks import check_decay, document_bounds, has_values
from sdm.ops.gated_delta_rule.inputs import Tokens
from sdm.ops.gated_delta_rule.reference import gated_delta_rule_reference, gated_delta_step_reference_
from sdm.ops.sequences import Call, ChannelDecay, segment_sums

CHUNK = 64


def gated_delta_rule_chunked(call: Call, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Products of whole matrices spread an infinity or NaN to tokens of its chunk that never meet it, since 0 times NaN
    is NaN, in backward too: such a call runs token by token. A traced graph has no values to look at.
    """
    tokens, initial_state = call.in_full()
    check_decay(tokens.log_decay)
    y, state = _run_chunks(tokens, initial_state, call.cu_seqlens, chunk)
    if has_values(y) and not bool((y.detach().sum() + state.detach().sum()).isfinite()):
        return gated_delta_rule_reference(call)
    return y, state


CHUNKED = Backend("chunked", gated_delta_rule_chunked, gated_delta_step_reference_)


def _run_chunks(tokens: Tokens, initial_state: Tensor, cu_seqlens: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    time = tokens.value.shape[1]
    chunk = min(chunk, max(time, 1))
    if cu_seqlens is None:
        parts = chunk_parts(tokens, chunk)
        y, state = _carry(parts, initial_state)
        return y[:, :time], state

    bounds = document_bounds(cu_seqlens, time)
    place, chunks = chunks_of_documents(bounds, chunk, tokens.value.device)
    # One row of zeros at the end serves every place that pads a document's last chunk.
    padded = Tokens(*(torch.cat((x, x.new_zeros(1, 1, *x.shape[2:])), dim=1)[:, place] for x in tokens))
    parts = chunk_parts(padded, chunk)
    outputs, states = [], []
    first_chunk = 0
    for document, (start, end) in enumerate(itertools.pairwise(bounds)):
        last_chunk = first_chunk + chunks[document]
        part = Parts(*(x[:, :, first_chunk:last_chunk] for x in parts))
        y, state = _carry(part, initial_state[document : document + 1])
        outputs.append(y[:, : end - start])
        states.append(state)
        first_chunk = last_chunk
    return torch.cat(outputs, dim=1), torch.cat(states)


class Parts(NamedTuple):
    """What a chunk contributes, whatever the state it starts from."""

    query: Tensor  # [B,H,G,C,K] times the decay since the start of the chunk
    key: Tensor  # [B,H,G,C,K] times the decay to the end of the chunk
    scores: Tensor  # [B,H,G,C,C] query times earlier keys, decayed
    delta_free: Tensor  # [B,H,G,C,D] U, the deltas that a zero state would give
    delta_state: Tensor  # [B,H,G,C,K] W, how the deltas depend on the state
    decay: Tensor  # [B,H,G,1,1] or [B,H,G,K,1] the decay of the whole chunk


def chunk_parts(tokens: Tokens, chunk: int) -> Parts:
    """Work out what each chunk contributes, for all chunks at once."""
    # Padding tokens have beta = 0 and log_decay = 0: they leave the state as it is.
    time = tokens.value.shape[1]
    groups = -(-time // chunk)
    query, key, value, beta, log_decay = (
        torch.nn.functional.pad(x.movedim(2, 1), (0, 0) * (x.dim() - 3) + (0, groups * chunk - time)).unflatten(
            2, (groups, chunk)
        )
        for x in tokens
    )
    beta = beta.unsqueeze(-1)
    key_beta = key * beta
    if log_decay.dim() == key.dim():
        decays = ChannelDecay(log_decay)
        system, scores = (decays.pairs(left, key) for left in (key_beta, query))
        since_start, to_end = decays.since_start, decays.to_end
    else:
        decay_CC = segment_sums(log_decay).exp()
        system, scores = (left @ key.transpose(-1, -2) * decay_CC for left in (key_beta, query))
        since_start, to_end = log_decay.cumsum(-1).exp().unsqueeze(-1), decay_CC[..., -1, :].unsqueeze(-1)

    right = torch.cat((value * beta, key_beta * since_start), dim=-1)
    # The diagonal of ones is implied, and need not be stored.
    solved = torch.linalg.solve_triangular(system.tril(-1), right, upper=False, unitriangular=True)
    delta_free, delta_state = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    return Parts(
        query=query * since_start,
        key=key * to_end,
        scores=scores,
        delta_free=delta_free,
        delta_state=delta_state,
        decay=since_start[..., -1, :].unsqueeze(-1),
    )


def _carry(parts: Parts, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the chunks one after the other. The output is [B, G*C, H, D], padding included."""
    outputs = []
    for query, key, scores, delta_free, delta_state, decay in zip(*(x.unbind(2) for x in parts), strict=True):
        delta = delta_free - delta_state @ state
        outputs.append(query @ state + scores @ delta)
        state = decay * state + key.transpose(-1, -2) @ delta
    if not outputs:
        return parts.delta_free.flatten(2, 3).movedim(1, 2), state.clone()
    return torch.cat(outputs, dim=2).movedim(1, 2), state


def chunks_of_documents(bounds: list[int], chunk: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Where each place of each chunk finds its token (T: a row of padding), and how many chunks a document has."""
    time = bounds[-1]
    places, chunks = [], []
    for start, end in itertools.pairwise(bounds):
        chunks.append(-(-(end - start) // chunk))
        place = torch.arange(start, start + chunks[-1] * chunk)
        places.append(place.masked_fill(place >= end, time))
    return torch.cat(places).to(device), chunks
