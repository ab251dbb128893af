"""The gated delta rule on GPUs: chunks as in `chunked.py`, and two kernels that carry the state through them.

Everything but the state is found for all chunks at once by products of matrices; what is left of time is one launch
forward and one backward. Packed documents are laid out into chunks on the device, so that nothing waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.ops.backends import no_forward_mode
from sdm.ops.checks import check_decay
from sdm.ops.gated_delta_rule.chunked import Parts, chunk_parts
from sdm.ops.gated_delta_rule.reference import gated_delta_step_reference_
from sdm.ops.gated_delta_rule.triton.host import LARGEST_KEY, chunk_size
from sdm.ops.sequences import Call, PackedChunks
from sdm.ops.triton.backend import TritonBackend


def gated_delta_rule_triton(call: Call) -> tuple[Tensor, Tensor]:
    """Serve a call by batched products and the kernels of `carry.py`.

    An infinity or NaN spreads to tokens of its chunk that never meet it, since 0 times NaN is NaN.
    """
    tokens, initial = call.in_full()
    time, cu_seqlens = tokens.value.shape[1], call.cu_seqlens
    check_decay(tokens.log_decay)
    if time == 0 or tokens.value.numel() == 0:
        return tokens.value.clone(), initial.clone()
    chunk = chunk_size(call.rows, time)
    if cu_seqlens is None:
        y, final = _carry(chunk_parts(tokens, chunk), initial, None)
        return y[:, :time], final
    documents = PackedChunks.of(cu_seqlens, time, chunk, tokens.value.device)
    y, final = _carry(chunk_parts(documents.pad(tokens), chunk), initial, documents.chunks)
    return y[:, documents.slot], final


def _carry(parts: Parts, initial: Tensor, chunks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output [B,G*C,H,D], padding included, and the final states."""
    batch, heads = parts.query.shape[:2]
    states, delta, final = torch.ops.sdm.gated_delta_carry_triton(
        parts.delta_state.flatten(0, 1),
        parts.delta_free.flatten(0, 1),
        parts.key.flatten(0, 1),
        parts.decay.flatten(0, 1).squeeze(-1),
        initial.flatten(0, 1),
        chunks,
        heads,
    )
    y = parts.query.flatten(0, 1) @ states + parts.scores.flatten(0, 1) @ delta
    return y.unflatten(0, (batch, heads)).flatten(2, 3).movedim(1, 2), final.unflatten(0, (-1, heads))


def _unsupported_reason(call: Call) -> str | None:
    if call.dtype == torch.float64 and call.device.type != "cpu":
        return "its kernels compute in float32, got torch.float64"
    if call.rows > LARGEST_KEY:
        return f"its kernels hold states of up to {LARGEST_KEY} key channels, got {call.rows}"
    return no_forward_mode(call)


TRITON = TritonBackend(gated_delta_rule_triton, gated_delta_step_reference_, unsupported_call=_unsupported_reason)
