"""Product-key selection over all N sums: the specification that every other backend is compared with."""

from __future__ import annotations

from torch import Tensor

from sdm.ops.backends import Backend
from sdm.ops.product_key.inputs import Call
from sdm.ops.product_key.order import exact_sum, first_k, ranking_scores, values_at


def product_key_topk_reference(call: Call) -> tuple[Tensor, Tensor]:
    """Serve a call by the definition: the sums of all pairs."""
    scores, k = call.in_full()
    first, second = ranking_scores(scores).chunk(2, dim=-1)
    rounded, error = exact_sum(first.unsqueeze(-1), second.unsqueeze(-2))
    index = first_k(rounded.flatten(-2), error.flatten(-2), k)
    return values_at(scores, index), index


REFERENCE = Backend("reference", product_key_topk_reference, onnx=True)
