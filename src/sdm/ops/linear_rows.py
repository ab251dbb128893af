"""y = x W^T + b by the compiled core, each row by itself.

Matrix libraries are made for many rows, and round a row differently with the number of rows beside it. The core reads
the weights once, at the speed of memory, for as few rows as a decode step has, and the bits of a row depend on nothing
but the row.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sdm.native import missing_because, require_core

MISSING = missing_because
"""Why this machine does not have it, if so."""

_FORMATS = {torch.bfloat16: 1, torch.int8: 2}  # WeightFormat of the core; 0: as x
_WEIGHT_DTYPES = {torch.float32: (torch.float32, *_FORMATS), torch.float64: (torch.float64,)}


class Weights(NamedTuple):
    """The weights of one linear layer, as `linear_rows` takes them."""

    weight: Tensor  # [outputs,inputs]
    bias: Tensor | None = None  # [outputs]
    scale: Tensor | None = None  # [outputs]


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
    _check(x, weight, bias, scale)
    outputs, inputs = weight.shape
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


def linear_group(x: Tensor, layers: Sequence[Weights]) -> Tensor:
    """Multiply rows with several matrices in one call of the core, each as `linear_rows` does.

    Returns:
        y [...,sum of the outputs], the outputs of the layers side by side.
    """
    x = x.contiguous()
    fields: list[int] = []
    kept = []  # contiguous copies must live until the core returns
    for layer in layers:
        _check(x, *layer)
        weight, bias, scale = (tensor if tensor is None else tensor.contiguous() for tensor in layer)
        assert weight is not None
        kept.append((weight, bias, scale))
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in (weight, scale, bias))
        fields += (weight.shape[0], _FORMATS.get(weight.dtype, 0), *addresses)
    described = array("q", fields)
    y = x.new_empty((*x.shape[:-1], sum(fields[::5])))
    require_core().linear_group(
        x.dtype == torch.float64,
        threads=torch.get_num_threads(),
        rows=math.prod(x.shape[:-1]),
        inputs=x.shape[-1],
        count=len(layers),
        layers=described.buffer_info()[0],
        x=x.data_ptr(),
        y=y.data_ptr(),
    )
    return y


def gated_mlp_rows(x: Tensor, gate: Weights, up: Weights, down: Weights) -> Tensor:
    """Compute (silu(x gate^T) * x up^T) down^T for a few rows x [...,inputs], in one call of the core."""
    _check(x, *gate)
    _check(x, *up)
    hidden = up.weight.shape[0]
    _check(x, *down, inputs=hidden)
    if gate.weight.shape != up.weight.shape:
        raise ValueError("gate and up must have the shape [hidden,inputs] and down [outputs,hidden]")
    if not gate.weight.dtype == up.weight.dtype == down.weight.dtype or not gate.bias is up.bias is down.bias is None:
        raise ValueError("the three layers must have weights of one dtype and no bias")
    for layer in (gate, up, down):
        if not layer.weight.is_contiguous() or not (layer.scale is None or layer.scale.is_contiguous()):
            raise ValueError("weights must be contiguous")
    x = x.contiguous()
    outputs = down.weight.shape[0]
    y = x.new_empty((*x.shape[:-1], outputs))
    require_core().gated_mlp(
        x.dtype == torch.float64,
        threads=torch.get_num_threads(),
        rows=math.prod(x.shape[:-1]),
        inputs=x.shape[-1],
        hidden=hidden,
        outputs=outputs,
        format=_FORMATS.get(up.weight.dtype, 0),
        x=x.data_ptr(),
        gate=gate.weight.data_ptr(),
        up=up.weight.data_ptr(),
        down=down.weight.data_ptr(),
        gate_scale=None if gate.scale is None else gate.scale.data_ptr(),
        up_scale=None if up.scale is None else up.scale.data_ptr(),
        down_scale=None if down.scale is None else down.scale.data_ptr(),
        y=y.data_ptr(),
    )
    return y


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x weight / sqrt(mean(x^2) + eps) for a few rows x [...,size], in float32 or float64 on a CPU."""
    size = x.shape[-1]
    if weight.shape != (size,) or weight.dtype != x.dtype or x.dtype not in _WEIGHT_DTYPES:
        raise ValueError(
            f"weight must be [{size}] in the dtype of x, float32 or float64; got {list(weight.shape)} in "
            f"{weight.dtype} and x in {x.dtype}"
        )
    if not x.is_cpu or not weight.is_cpu:
        raise ValueError(f"all tensors must be on a CPU, got x on {x.device} and weight on {weight.device}")
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    require_core().rms_norm(
        x.dtype == torch.float64,
        threads=1,
        rows=x.numel() // size if size else 0,
        size=size,
        eps=eps,
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        y=y.data_ptr(),
    )
    return y


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, inputs: int | None = None) -> None:
    """`inputs`: the channels of the rows, if they are not those of x."""
    outputs, wanted = weight.shape
    inputs = x.shape[-1] if inputs is None else inputs
    if inputs != wanted or weight.dtype not in _WEIGHT_DTYPES.get(x.dtype, ()):
        raise ValueError(
            f"x must be [...,{wanted}] in float32 or float64 and weight of its dtype, or bfloat16 or int8 for float32; "
            f"got x [...,{inputs}] in {x.dtype} and weight in {weight.dtype}"
        )
    for name, vector in (("bias", bias), ("scale", scale)):
        if vector is not None and (vector.shape != (outputs,) or vector.dtype != x.dtype):
            raise ValueError(f"{name} must be [{outputs}] in {x.dtype}, got {list(vector.shape)} in {vector.dtype}")
    if not (x.is_cpu and weight.is_cpu and (bias is None or bias.is_cpu) and (scale is None or scale.is_cpu)):
        raise ValueError(f"all tensors must be on a CPU, got x on {x.device} and weight on {weight.device}")
