"""Rows of a table, and how backward keeps old ones: kernel helpers.

Planned inversion keeps few rows, as they are. Snapshots of all rows, the paper's way, are here to be compared with it:
in bfloat16, or in 8 or 4 bits with a scale per row and program.
"""

from __future__ import annotations

import triton
import triton.language as tl

# How the row before a write is recovered: 0 by inversion, -1 it is zero, n > 0 it is the n-th kept row of its token.
INVERTED = tl.constexpr(0)
ZERO = tl.constexpr(-1)


@triton.jit
def load_rows(table, slot, wanted, channel, lane, D):  # type: ignore[no-untyped-def]
    """[X,S]: the rows of the slots [X] that are wanted, zeros elsewhere."""
    address = table + slot.to(tl.int64)[:, None] * D + channel[None, :]
    return tl.load(address, mask=wanted[:, None] & lane[None, :], other=0)


@triton.jit
def store_rows(table, slot, rows, wanted, channel, lane, D):  # type: ignore[no-untyped-def]
    """rows [X,S] to the slots [X] that are wanted."""
    address = table + slot.to(tl.int64)[:, None] * D + channel[None, :]
    tl.store(address, rows, mask=wanted[:, None] & lane[None, :])


@triton.jit
def keep_rows(rows, position, wanted, lane, saved, scales, S: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """rows [X,S] to the places `position` [X] of the ring."""
    channel = tl.arange(0, S)
    at = position[:, None] * S + channel[None, :]
    mask = wanted[:, None] & lane[None, :]
    if KIND == "fp8" or KIND == "int4":
        largest: tl.constexpr = 448.0 if KIND == "fp8" else 7.0
        scale = tl.max(tl.abs(rows), 1) / largest
        scale = tl.where(scale > 0, scale, 1)
        tl.store(scales + position, scale, mask=wanted)
        rows = rows / scale[:, None]
    if KIND == "int4":
        # Two neighbours share a byte.
        digit = tl.floor(rows + 0.5).to(tl.int32) + 8
        low, high = tl.split(tl.reshape(digit, (rows.shape[0], S // 2, 2)))
        pair = tl.arange(0, S // 2)
        at = position[:, None] * (S // 2) + pair[None, :]
        tl.store(saved + at, (low | high << 4).to(tl.uint8), mask=wanted[:, None] & (pair >= 0)[None, :])
    else:
        tl.store(saved + at, rows.to(saved.dtype.element_ty), mask=mask)


@triton.jit
def kept_rows(position, wanted, lane, saved, scales, S: tl.constexpr, KIND: tl.constexpr, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load saved rows in the format that they were kept in."""
    channel = tl.arange(0, S)
    mask = wanted[:, None] & lane[None, :]
    if KIND == "int4":
        at = position[:, None] * (S // 2) + (channel // 2)[None, :]
        digits = tl.load(saved + at, mask=mask, other=0).to(tl.int32)
        rows = (((digits >> (4 * (channel % 2))[None, :]) & 15) - 8).to(ACC)
    else:
        at = position[:, None] * S + channel[None, :]
        rows = tl.load(saved + at, mask=mask, other=0.0).to(ACC)
    if KIND == "fp8" or KIND == "int4":
        rows *= tl.load(scales + position, mask=wanted, other=0)[:, None]
    return rows
