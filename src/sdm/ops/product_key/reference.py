"""Product-key selection over all N sums: the specification that every other backend is compared with.

The order in which slots are selected: exact sum, larger first; then slot number, lower first. Why the exact sum and not
the rounded one: pruning drops a pair (a, b) of ranks when k pairs with both ranks no worse precede it. A rounded sum
can tie with that of a strictly better pair whose slot number is higher, and the tie rule would then prefer the worse
pair. Exact sums tie only if both scores tie, and ranks put the lower index first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.ops.backends import Backend, exports_onnx
from sdm.ops.product_key.inputs import Call


def ranking_scores(scores: Tensor) -> Tensor:
    """Finite scores whose pairwise sums are finite as well: what the order looks at, never what is returned."""
    largest = torch.finfo(scores.dtype).max / 2
    return scores.detach().nan_to_num(nan=largest, posinf=largest, neginf=-largest).clamp(-largest, largest)


def exact_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Knuth's TwoSum: the rounded sum and its rounding error, which together are a + b without error.

    Rounding is monotone, so that comparing the rounded sums first and the errors second compares the exact sums.
    """
    rounded = a + b
    b_part = rounded - a
    error = (a - (rounded - b_part)) + (b - b_part)
    return rounded, error


def first_k(rounded: Tensor, error: Tensor, k: int) -> Tensor:
    """The positions [..., k] of the k best, ascending; the last axis must list the slots in ascending order."""
    # Stable sorts, the least significant key first: slot (by position), then error, then rounded sum.
    by_error = _descending(error)
    by_sum = _descending(rounded.gather(-1, by_error))
    return by_error.gather(-1, by_sum[..., :k]).sort(dim=-1).values


def _descending(x: Tensor) -> Tensor:
    """The positions of the last axis, largest entry first; equal entries keep their order."""
    if exports_onnx():
        # ONNX has no stable sort, but its TopK keeps the order of equal entries, unlike torch's.
        return x.topk(x.shape[-1], dim=-1).indices
    return x.argsort(dim=-1, descending=True, stable=True)


def values_at(scores: Tensor, index: Tensor) -> Tensor:
    """The sums of the selected slots, differentiable in the scores."""
    n = scores.shape[-1] // 2
    return scores.gather(-1, index // n) + scores.gather(-1, n + index % n)


def product_key_topk_reference(call: Call) -> tuple[Tensor, Tensor]:
    """Serve a call by the definition: the sums of all pairs."""
    scores, k = call.in_full()
    first, second = ranking_scores(scores).chunk(2, dim=-1)
    rounded, error = exact_sum(first.unsqueeze(-1), second.unsqueeze(-2))
    index = first_k(rounded.flatten(-2), error.flatten(-2), k)
    return values_at(scores, index), index


REFERENCE = Backend("reference", product_key_topk_reference, onnx=True)
