"""Walks along the accesses of a slot within a chunk, for vectors of S channels: kernel helpers.

An access has a number within its chunk: write i of token t is t*WP + i, and the reads come after all writes. Pointers
are to the chunk's first token, so that offsets within it fit into 32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def vectors(pointer, token, stride, channel, wanted, lane):  # type: ignore[no-untyped-def]
    """[C,X,S]: the vectors of the tokens [C,X] that are wanted, zeros elsewhere."""
    at = (token * stride)[:, :, None] + channel[None, None, :]
    return tl.load(pointer + at, mask=wanted[:, :, None] & lane[None, None, :], other=0)


@triton.jit
def add_older_pushes(  # type: ignore[no-untyped-def]
    content, product, number, steps, channel, lane, write_weight, beta, factor, prev, residual,
    H, W, D, WP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """content [C,X,S] plus the pushes of the writes that `number` [C,X] names and of those before them, each times the
    factors since and `product`; and the product of all these factors."""
    for _ in range(steps):
        hit = number >= 0
        token = number // WP * H
        at = token * W + number % WP
        push = tl.load(write_weight + at, mask=hit, other=0).to(ACC) * tl.load(beta + token, mask=hit, other=0).to(ACC)
        content += (product * push)[:, :, None] * vectors(residual, token, D, channel, hit, lane)
        product *= tl.load(factor + at, mask=hit, other=1)
        number = tl.load(prev + at, mask=hit, other=-1).to(tl.int32)
    return content, product


@triton.jit
def add_later_accesses(  # type: ignore[no-untyped-def]
    gradient, number, steps, channel, lane,
    write_weight, factor, next_of_write, read_weight, next_of_read, grad_value, grad_y,
    H, D, W, R, C: tl.constexpr, WP: tl.constexpr, RP: tl.constexpr, SLOT_RULE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """gradient [C,X,S] plus what the accesses that `number` names ask of their slot, and those after them."""
    product = tl.full((number.shape[0], number.shape[1]), 1, ACC)
    for _ in range(steps):
        read = number >= C * WP
        following = tl.full(number.shape, -1, tl.int32)
        if C > 1:  # after a token's own write only its own read can come
            written = (number >= 0) & (number < C * WP)
            token = number // WP * H
            at = token * W + number % WP
            product *= tl.load(factor + at, mask=written, other=1)
            following = tl.load(next_of_write + at, mask=written, other=-1).to(tl.int32)
            if not SLOT_RULE:
                taken = product * tl.load(write_weight + at, mask=written, other=0).to(ACC)
                gradient -= taken[:, :, None] * vectors(grad_value, token, D, channel, written, lane)
        token = (number - C * WP) // RP * H
        at = token * R + (number - C * WP) % RP
        asked = product * tl.load(read_weight + at, mask=read, other=0).to(ACC)
        gradient += asked[:, :, None] * vectors(grad_y, token, D, channel, read, lane).to(ACC)
        number = tl.where(read, tl.load(next_of_read + at, mask=read, other=-1).to(tl.int32), following)
    return gradient


@triton.jit
def add_reads_before_writes(  # type: ignore[no-untyped-def]
    gradient, number, steps, channel, lane, read_weight, next_of_read, grad_y,
    H, D, R, C: tl.constexpr, WP: tl.constexpr, RP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The same for the reads that come before any write of the chunk."""
    for _ in range(steps):
        read = number >= C * WP
        token = (number - C * WP) // RP * H
        at = token * R + (number - C * WP) % RP
        asked = tl.load(read_weight + at, mask=read, other=0).to(ACC)
        gradient += asked[:, :, None] * vectors(grad_y, token, D, channel, read, lane).to(ACC)
        number = tl.load(next_of_read + at, mask=read, other=-1).to(tl.int32)
    return gradient
