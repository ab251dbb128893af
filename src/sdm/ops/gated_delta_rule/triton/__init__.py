"""The gated delta rule on GPUs: chunks as in `chunked.py`, and two kernels that carry the state through them.

Everything but the state is found for all chunks at once by products of matrices; what is left of time is one launch
forward and one backward. Packed documents are laid out into chunks on the device, so that nothing waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.ops.backends import no_forward_mode
from sdm.ops.checks import check_decay, document_bounds, has_values
from sdm.ops.gated_delta_rule.chunked import Parts, chunk_parts
from sdm.ops.gated_delta_rule.inputs import Tokens
from sdm.ops.gated_delta_rule.reference import gated_delta_step_reference_
from sdm.ops.gated_delta_rule.triton.host import LARGEST_KEY, chunk_size
from sdm.ops.sequences import Call
from sdm.ops.triton.backend import TritonBackend


def gated_delta_rule_triton(call: Call) -> tuple[Tensor, Tensor]:
    """Serve a call by batched products and the kernels of `carry.py`.

    An infinity or NaN spreads to tokens of its chunk that never meet it, since 0 times NaN is NaN.
    """
    tokens, initial = call.in_full()
    time, cu_seqlens = tokens.value.shape[1], call.cu_seqlens
    # What reading costs nothing is checked.
    check_decay(tokens.log_decay)
    if cu_seqlens is not None and cu_seqlens.is_cpu and has_values(cu_seqlens):
        document_bounds(cu_seqlens, time)
    if time == 0 or tokens.value.numel() == 0:
        return tokens.value.clone(), initial.clone()
    chunk = chunk_size(call.rows, time)
    if cu_seqlens is None:
        y, final = _carry(chunk_parts(tokens, chunk), initial, None)
        return y[:, :time], final
    place, slot, chunks = _layout(cu_seqlens.to(tokens.value.device), time, chunk)
    # One row of zeros at the end serves every place that pads a document's last chunk.
    padded = Tokens(*(torch.cat((x, x.new_zeros(1, 1, *x.shape[2:])), dim=1)[:, place] for x in tokens))
    y, final = _carry(chunk_parts(padded, chunk), initial, chunks)
    return y[:, slot], final


def _layout(cu_seqlens: Tensor, time: int, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each place of each chunk finds its token (T: padding), where each token went, and the chunks [S+1] at which
    documents begin. There are as many chunks as documents of this number can take at most.
    """
    device, count = cu_seqlens.device, cu_seqlens.numel() - 1
    # Nobody looks at offsets on a GPU. In ascending order and within the row they lead nowhere else.
    bounds = cu_seqlens.to(torch.int64).clamp(0, time).cummax(0).values
    chunks = torch.cat((bounds.new_zeros(1), ((bounds.diff() + chunk - 1) // chunk).cumsum(0)))
    group = torch.arange(time // chunk + count, device=device)
    document = torch.bucketize(group, chunks[1:], right=True)
    known = document.clamp(max=count - 1)
    start = bounds[known] + (group - chunks[known]) * chunk
    place = start.unsqueeze(-1) + torch.arange(chunk, device=device)
    used = (document < count).unsqueeze(-1) & (place < bounds[known + 1].unsqueeze(-1))
    token = torch.arange(time, device=device)
    of = torch.bucketize(token, bounds[1:], right=True).clamp(max=count - 1)
    slot = (chunks[of] * chunk + token - bounds[of]).clamp(0, len(group) * chunk - 1)
    return torch.where(used, place, time).flatten(), slot, chunks


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
