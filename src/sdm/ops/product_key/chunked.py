"""Product-key selection over the pairs that can win, about k ln k of the N.

With both halves sorted, the pair of ranks (a, b), counted from zero, is preceded by every pair of ranks no worse than
these: (a+1)(b+1) - 1 of them. It can be among the first k only if (a+1)(b+1) <= k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.ops.backends import Backend
from sdm.ops.product_key.inputs import Call
from sdm.ops.product_key.reference import exact_sum, first_k, ranking_scores, values_at


def product_key_topk_chunked(call: Call) -> tuple[Tensor, Tensor]:
    """Serve a call in plain PyTorch, over the pairs that can be among the best k."""
    scores, k = call.in_full()
    n = scores.shape[-1] // 2
    # A stable sort ranks the lower index first among equal scores, as the order among slots wants it.
    (first, first_at), (second, second_at) = (
        half.sort(dim=-1, descending=True, stable=True) for half in ranking_scores(scores).chunk(2, dim=-1)
    )
    rank_a, rank_b = _candidate_ranks(n, k, scores.device)
    slot, by_slot = (first_at[..., rank_a] * n + second_at[..., rank_b]).sort(dim=-1)
    rounded, error = exact_sum(first[..., rank_a], second[..., rank_b])
    best = first_k(rounded.gather(-1, by_slot), error.gather(-1, by_slot), k)
    index = slot.gather(-1, best)
    return values_at(scores, index), index


CHUNKED = Backend("chunked", product_key_topk_chunked)


def _candidate_ranks(n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rank pairs [P] with (a+1)(b+1) <= k."""
    widths = [min(n, k // (a + 1)) for a in range(min(n, k))]
    rank_a = [a for a, width in enumerate(widths) for _ in range(width)]
    rank_b = [b for width in widths for b in range(width)]
    return torch.tensor(rank_a, device=device), torch.tensor(rank_b, device=device)
