"""Product keys: the k best of N slots from 2 sqrt(N) scores.

A slot is a pair (i1, i2) and scores `scores[i1] + scores[sqrt(N) + i2]`. The order among slots is total and the same
for every backend: by the exact real sum, larger first, then by slot number, lower first. See `reference.py`.

Shapes: n = sqrt(N) scores per half, k selected slots, P candidate pairs.
"""

from __future__ import annotations

from torch import Tensor

from sdm.ops.backends import BACKENDS, serve
from sdm.ops.product_key.chunked import CHUNKED
from sdm.ops.product_key.inputs import Call, check_scores
from sdm.ops.product_key.native import NATIVE
from sdm.ops.product_key.reference import REFERENCE
from sdm.ops.product_key.triton import TRITON

__all__ = ["product_key_topk"]

BACKENDS["product_key_topk"] = [NATIVE, TRITON, CHUNKED, REFERENCE]


def product_key_topk(scores: Tensor, k: int, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The k largest of the N sums `scores[..., i1] + scores[..., sqrt(N) + i2]`, without forming all N.

    Args:
        scores: `[..., 2 sqrt(N)]`, the two halves of sub-scores side by side, floating point.
        k: how many slots to select, 1 to N. It may exceed sqrt(N).
        backend: "auto", "reference" (forms all N sums), "chunked" (plain PyTorch on the pairs that can win),
            "native" (C++, CPU) or "triton" (GPUs).

    Returns:
        values: `[..., k]` the selected sums, in the dtype of scores and at least float32; gradients flow through them.
        index: `[..., k]` int64, the selected slots `i1 * sqrt(N) + i2`, ascending.

    Equal sums go to the lower slot. NaN counts as the largest score, so that it reaches the output instead of being
    hidden by the selection; whatever the scores, the slots are distinct and in range.
    """
    check_scores(scores, k)
    values, index = serve("product_key_topk", backend, Call(scores, k))
    return values, index
