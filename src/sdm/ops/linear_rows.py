"""y = x W^T + b by the compiled core, each row by itself.

Matrix libraries are made for many rows, and round a row differently with the number of rows beside it. The core reads
the weights once, at the speed of memory, for as few rows as a decode step has, and the bits of a row depend on nothing
but the row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdm.native import missing_because, require_core

MISSING = missing_because
"""Why this machine does not have it, if so."""

_FORMATS = {torch.bfloat16: 1, torch.int8: 2}  # WeightFormat of the core; 0: as x


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """Multiply rows with a matrix, without gradients.

    Args:
        x: [...,inputs], float32 or float64, on a CPU.
        weight: [outputs,inputs], in the dtype of x; for float32 also bfloat16 or int8.
        bias: [outputs], in the dtype of x.
        scale: [outputs], multiplies the products before the bias is added; in the dtype of x.

    Returns:
        y [...,outputs].
    """
    outputs, inputs = weight.shape
    formats = {torch.float32: (torch.float32, *_FORMATS), torch.float64: (torch.float64,)}
    if x.shape[-1] != inputs or weight.dtype not in formats.get(x.dtype, ()):
        raise ValueError(
            f"x must be [...,{inputs}] in float32 or float64 and weight of its dtype, or bfloat16 or int8 for float32; "
            f"got x {list(x.shape)} in {x.dtype} and weight in {weight.dtype}"
        )
    for name, vector in (("bias", bias), ("scale", scale)):
        if vector is not None and (vector.shape != (outputs,) or vector.dtype != x.dtype):
            raise ValueError(f"{name} must be [{outputs}] in {x.dtype}, got {list(vector.shape)} in {vector.dtype}")
    if not all(tensor is None or tensor.is_cpu for tensor in (x, weight, bias, scale)):
        raise ValueError(f"all tensors must be on a CPU, got x on {x.device} and weight on {weight.device}")
    x, weight = x.contiguous(), weight.contiguous()
    bias, scale = (vector if vector is None else vector.contiguous() for vector in (bias, scale))
    y = x.new_empty((*x.shape[:-1], outputs))
    require_core().linear(
        x.dtype == torch.float64,
        threads=torch.get_num_threads(),
        rows=math.prod(x.shape[:-1]),
        inputs=inputs,
        outputs=outputs,
        format=_FORMATS.get(weight.dtype, 0),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        scale=None if scale is None else scale.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
    )
    return y
