"""Product-key selection on GPUs: one launch forward, one backward."""

from __future__ import annotations

from torch import Tensor

from sdm.ops.backends import no_forward_mode
from sdm.ops.product_key.inputs import Call
from sdm.ops.product_key.triton import host
from sdm.ops.triton.backend import TritonBackend


def product_key_topk_triton(call: Call) -> tuple[Tensor, Tensor]:
    """Serve a call of `product_key_topk` by the kernels for GPUs."""
    return host.topk(call.scores, call.k)


def _unsupported_reason(call: Call) -> str | None:
    return no_forward_mode(call) or host.unsupported_reason(call.scores, call.k)


TRITON = TritonBackend(product_key_topk_triton, unsupported_call=_unsupported_reason)
