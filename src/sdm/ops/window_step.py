"""One decode step of sliding-window attention by the compiled core: rotation, ring, softmax and gate in one call.

`S` streams, `H` query heads, `G` key-value heads, `D` head channels, `W` window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.native import require_core
from sdm.ops.checks import check_shape, mark_changed


def window_step_(
    projected: Tensor, key: Tensor, value: Tensor, length: Tensor, turns: Tensor, rope_scale: float, heads: int
) -> Tensor:
    """Write a token into the rings and read them.

    Args:
        projected: [S,(2H+2G)D], query, key, value and gate of the token side by side, in float32 or float64, on a CPU.
        key: [S,G,W,D] in the dtype of `projected`, rotated keys, position p in place p mod W. It changes in place.
        value: the same of values.
        length: [S] int64, tokens before this one. It does not change.
        turns: [D/2] float64, whole turns per position of each pair of channels.
        rope_scale: multiplies rotated queries and keys.
        heads: H.

    Returns:
        The readings times the sigmoid of the gate, [S,HD].
    """
    check_shape("key", key, (None,) * 4, "[S,G,W,D]")
    S, G, W, D = key.shape
    check_shape("value", value, tuple(key.shape), "the shape of key")
    check_shape("projected", projected, (S, 2 * (heads + G) * D), "[S,(2H+2G)D]")
    check_shape("length", length, (S,), "[S]")
    check_shape("turns", turns, (D // 2,), "[D/2]")
    dtype = projected.dtype
    fits = key.dtype == value.dtype == dtype and length.dtype == torch.int64 and turns.dtype == torch.float64
    if dtype not in (torch.float32, torch.float64) or not fits:
        raise TypeError(
            f"projected, key and value must be all float32 or all float64, length int64 and turns float64; got "
            f"{dtype}, {key.dtype}, {value.dtype}, {length.dtype} and {turns.dtype}"
        )
    for name, tensor in (
        ("projected", projected),
        ("key", key),
        ("value", value),
        ("length", length),
        ("turns", turns),
    ):
        if not tensor.is_cpu or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous and on a CPU, got strides {tensor.stride()} on {tensor.device}"
            )
    y = projected.new_empty(S, heads * D)
    require_core().window_step(
        dtype == torch.float64,
        threads=torch.get_num_threads(),
        streams=S,
        heads=heads,
        key_heads=G,
        channels=D,
        window=W,
        rope_scale=rope_scale,
        turns=turns.data_ptr(),
        length=length.data_ptr(),
        projected=projected.data_ptr(),
        keys=key.data_ptr(),
        values=value.data_ptr(),
        y=y.data_ptr(),
    )
    mark_changed(key)
    mark_changed(value)
    return y
