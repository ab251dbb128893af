"""Cross-entropy of next tokens whose logits are never all in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORED = -100


def next_token_targets(labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The label of each token's successor, [B,T]; the last token of a row or of a packed document has none."""
    targets = F.pad(labels[:, 1:], (0, min(1, labels.shape[1])), value=IGNORED)
    if cu_seqlens is not None:
        ends = cu_seqlens.to(labels.device, torch.int64)[1:] - 1
        targets[:, ends[ends >= 0]] = IGNORED
    return targets


def chunked_cross_entropy(
    hidden_states: Tensor, head: nn.Module, targets: Tensor, chunk_size: int, num_items: Tensor | int | None = None
) -> Tensor:
    """Mean cross-entropy of `head(hidden_states)` [B,T,vocab] against targets [B,T].

    The logits of `chunk_size` tokens at a time are computed, used and dropped, in backward once more.

    Args:
        num_items: divides the sum instead of the number of targets, for batches that are accumulated.
    """
    hidden_states, targets = hidden_states.flatten(0, 1), targets.flatten()
    total = hidden_states.new_zeros((), dtype=torch.promote_types(hidden_states.dtype, torch.float32))
    for hidden_piece, target_piece in zip(hidden_states.split(chunk_size), targets.split(chunk_size), strict=True):
        if torch.is_grad_enabled() and len(targets) > chunk_size:
            total = total + checkpoint(_sum, hidden_piece, head, target_piece, use_reentrant=False)
        else:
            total = total + _sum(hidden_piece, head, target_piece)
    if num_items is None:
        num_items = (targets != IGNORED).sum().clamp(min=1)
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(total.device)
    return total / num_items


def _sum(hidden_states: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    logits = head(hidden_states)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
