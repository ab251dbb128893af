"""Negative log-likelihood of tokens, in nats: the one place that computes it, for training and for measuring.

Shapes: B rows, T time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sdm.constants import IGNORED
from sdm.layers import LayerState
from sdm.models.cache import SDMCache

if TYPE_CHECKING:
    from sdm.models.modeling import SDMForCausalLM

Reduction = Literal["sum", "none"]
States = list[LayerState]


def nll(
    model: SDMForCausalLM,
    input_ids: Tensor,
    targets: Tensor,
    cu_seqlens: Tensor | None = None,
    states: States | None = None,
    carry: bool = False,
    segment_length: int | None = None,
    reduction: Reduction = "sum",
    begins: Tensor | None = None,
) -> tuple[Tensor, States | None]:
    """What the model makes of the targets [B,T], and with `carry` the states after the last token.

    Args:
        targets: the token to predict after each of input_ids, -100 where there is none.
        cu_seqlens: offsets of documents packed into one row, which neither have states nor are cut into segments.
        states: one per layer, to begin from; None: the streams begin.
        begins: [B], the rows that begin anew in spite of the states; learned initial states get a gradient from them.
        segment_length: cuts time into segments of which only the states in between are kept: backward computes each
            segment again when it gets there. Gradients pass through the states, so that nothing is truncated and the
            result is that of the whole; memory is that of one segment, whatever T.
        reduction: "sum", or "none" for [B,T] with zeros where there is no target.
    """
    if cu_seqlens is not None and (states is not None or carry or segment_length is not None):
        raise ValueError("cu_seqlens: packed documents have no states to begin from, to carry on or to cut time at")
    if states is None and not carry and segment_length is None:
        hidden = model.model(input_ids=input_ids, cu_seqlens=cu_seqlens, use_cache=False).last_hidden_state
        return _head_nll(model, hidden, targets, reduction), None

    def segment(
        input_ids: Tensor, targets: Tensor, before: States | None, begins: Tensor | None
    ) -> tuple[Tensor, States]:
        cache = SDMCache(model.config)
        if before is not None:
            for layer, state in zip(cache.layers, before, strict=True):
                layer.state, layer.begins = state, begins
        hidden = model.model(input_ids=input_ids, past_key_values=cache, use_cache=True).last_hidden_state
        after = [layer.state for layer in cache.layers if layer.state is not None]
        return _head_nll(model, hidden, targets, reduction), after

    if segment_length is None:
        return segment(input_ids, targets, states, begins)
    pieces = []
    for ids, wanted in zip(input_ids.split(segment_length, 1), targets.split(segment_length, 1), strict=True):
        if torch.is_grad_enabled():
            piece, states = checkpoint(
                segment, ids, wanted, states, begins, use_reentrant=False, preserve_rng_state=False
            )
        else:
            piece, states = segment(ids, wanted, states, begins)
        begins = None  # what follows goes on
        pieces.append(piece)
    return torch.stack(pieces).sum() if reduction == "sum" else torch.cat(pieces, 1), states


def _head_nll(model: SDMForCausalLM, hidden: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    wanted, chunk_size = targets != IGNORED, model.config.loss_chunk_size
    if 2 * int(wanted.sum()) > targets.numel():
        return target_nll(hidden, model.lm_head, targets, chunk_size, reduction)
    # Tasks with few answers need few logits.
    few = target_nll(hidden[wanted].unsqueeze(0), model.lm_head, targets[wanted].unsqueeze(0), chunk_size, reduction)
    if reduction == "sum":
        return few
    return few.new_zeros(targets.shape).masked_scatter(wanted, few)


def target_nll(
    hidden_states: Tensor, head: nn.Module, targets: Tensor, chunk_size: int | None, reduction: Reduction = "sum"
) -> Tensor:
    """The same from the hidden states [B,T,...] on: logits are `head(hidden_states)`.

    The logits of `chunk_size` tokens at a time, None for all, are computed, used and dropped, in backward once more.
    """
    hidden, flat = hidden_states.flatten(0, 1), targets.flatten()
    size = chunk_size or max(len(flat), 1)
    pieces = []
    for hidden_piece, target_piece in zip(hidden.split(size), flat.split(size), strict=True):
        if torch.is_grad_enabled() and len(flat) > size:
            pieces.append(checkpoint(_cross_entropy, hidden_piece, head, target_piece, reduction, use_reentrant=False))
        else:
            pieces.append(_cross_entropy(hidden_piece, head, target_piece, reduction))
    if reduction == "none":
        return torch.cat(pieces).view(targets.shape)
    return sum(pieces, hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32)))


def _cross_entropy(hidden_states: Tensor, head: nn.Module, targets: Tensor, reduction: Reduction) -> Tensor:
    logits = head(hidden_states)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)


def next_token_targets(labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The label of each token's successor, [B,T]; the last token of a row or of a packed document has none."""
    targets = F.pad(labels[:, 1:], (0, min(1, labels.shape[1])), value=IGNORED)
    if cu_seqlens is not None:
        # Place e says whether token e - 1 ends a document; nothing waits for a GPU to say which documents are empty.
        ends = cu_seqlens.to(labels.device, torch.int64)[1:].clamp(0, labels.shape[1])
        is_end = torch.zeros(labels.shape[1] + 1, dtype=torch.bool, device=labels.device).index_fill_(0, ends, True)
        targets = targets.masked_fill(is_end[1:], IGNORED)
    return targets
