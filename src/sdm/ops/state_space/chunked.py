"""The state-space rule, chunk by chunk in plain PyTorch.

With M0 the state at the start of a chunk, c_t the decay accumulated from there to token t and L[t,s] that from s to t,

    M_t = exp(c_t) M0 + sum_{s <= t} exp(L[t,s]) beta_s k_s v_s^T
    y_t = exp(c_t) M0^T q_t + sum_{s <= t} exp(L[t,s]) (q_t . k_s) beta_s v_s

What a chunk adds by itself is found for all chunks at once. Only M0 is handed from chunk to chunk: one after the other,
or, in an exported program, which knows no number of chunks, by a sum over all chunks before.

Shapes: B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents), G chunks of
C tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_exporting

from sdm.ops.backends import Backend
from sdm.ops.checks import check_decay
from sdm.ops.gated_delta_rule.inputs import Tokens
from sdm.ops.sequences import Call, PackedChunks, carry_states, segment_sums
from sdm.ops.state_space.reference import state_space_step_reference_

CHUNK = 64


def state_space_chunked(call: Call, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Serve a call in plain PyTorch, `chunk` tokens at a time."""
    tokens, initial_state = call.in_full()
    check_decay(tokens.log_decay)
    time = tokens.value.shape[1]
    if call.cu_seqlens is None and is_exporting():
        return _run_exported(tokens, initial_state, chunk)
    chunk = min(chunk, max(time, 1))
    if time == 0 or tokens.value.numel() == 0:
        return tokens.value.clone(), initial_state.clone()
    if call.cu_seqlens is None:
        y, state = _run(tokens, initial_state, None, chunk)
        return y[:, :time], state
    documents = PackedChunks.of(call.cu_seqlens, time, chunk, tokens.value.device)
    y, state = _run(documents.pad(tokens), initial_state, documents.chunks, chunk)
    return y[:, documents.slot], state


CHUNKED = Backend("chunked", state_space_chunked, state_space_step_reference_, onnx=True)


def _run(tokens: Tokens, initial: Tensor, chunks: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """The output [B, G*C, H, D], padding included, and the final states [S,H,K,D]; chunks as in `carry_states`."""
    # Padding tokens have beta = 0 and log_decay = 0: they leave the state as it is.
    groups = -(-tokens.value.shape[1] // chunk)
    short = groups * chunk - tokens.value.shape[1]
    parts = _parts(
        *(F.pad(x.movedim(2, 1), (0, 0) * (x.dim() - 3) + (0, short)).unflatten(2, (groups, chunk)) for x in tokens)
    )
    starts, finals = carry_states(parts.decay, parts.added, initial, chunks)
    return _output(parts, starts).flatten(2, 3).movedim(1, 2), finals


def _run_exported(tokens: Tokens, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Rows of any length from one state: no loop over chunks, and no size that depends on the example.

    torch.export takes a size of one in the example for a constant, hence a chunk more than needed. It cannot prove
    that a multiple of the chunk is divisible by it, hence indices instead of shapes.
    """
    time, device = tokens.value.shape[1], tokens.value.device
    groups = torch.arange((time + chunk - 1) // chunk + 1, device=device)
    place_GC = (chunk * groups.unsqueeze(1) + torch.arange(chunk, device=device)).clamp(max=time)
    padded = (torch.cat((x, x.new_zeros(len(x), 1, *x.shape[2:])), dim=1) for x in tokens)
    parts = _parts(*(x[:, place_GC].movedim(3, 1) for x in padded))
    # The state before the first chunk is one more addition, which nothing has decayed yet.
    added_BHGKD = torch.cat((state.unsqueeze(2), parts.added), dim=2)
    weight_BHGG = segment_sums(F.pad(parts.log_decay, (1, 0))).exp()
    states_BHGKD = (weight_BHGG @ added_BHGKD.flatten(-2)).unflatten(-1, state.shape[-2:])
    token = torch.arange(time, device=device)
    y_BHTD = _output(parts, states_BHGKD[:, :, :-1])[:, :, token // chunk, token % chunk]
    return y_BHTD.movedim(1, 2), states_BHGKD[:, :, -1]


class _Parts(NamedTuple):
    """What chunks consist of, and what they do to a state."""

    query: Tensor  # [B,H,G,C,K], decayed from the start of the chunk
    inside: Tensor  # [B,H,G,C,D] the output without the state
    added: Tensor  # [B,H,G,K,D] what a chunk adds to the state
    decay: Tensor  # [B,H,G,1,1] of the state
    log_decay: Tensor  # [B,H,G] its logarithm


def _parts(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor) -> _Parts:
    """Take apart tokens [B,H,G,C,...]."""
    value = value * beta.unsqueeze(-1)
    decay_CC = segment_sums(log_decay).exp()
    total = log_decay.cumsum(-1)
    since_start = total.exp().unsqueeze(-1)
    added_BHGKD = (key * decay_CC[..., -1, :].unsqueeze(-1)).transpose(-1, -2) @ value
    inside = (query @ key.transpose(-1, -2) * decay_CC) @ value
    return _Parts(query * since_start, inside, added_BHGKD, since_start[..., -1:, :], total[..., -1])


def _output(parts: _Parts, starts_BHGKD: Tensor) -> Tensor:
    """[B,H,G,C,D]."""
    return parts.inside + parts.query @ starts_BHGKD
