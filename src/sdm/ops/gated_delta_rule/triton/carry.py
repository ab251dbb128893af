"""The state from chunk to chunk, which is all of the gated delta rule that cannot be done for all chunks at once.

A program owns S value channels of one sequence and head, keeps its part [K,S] of the state in registers and walks the
chunks. With U, W and keys of `chunked.py`:

    forward:   states_g = M      delta_g = U_g - W_g M          M  <- decay_g M + keys_g^T delta_g
    backward:  grads_g = dM      dU_g = ddelta_g + keys_g dM    dM <- decay_g dM + dstates_g - W_g^T dU_g

Products are in float32 without tensor cores' rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matrix(start, rows, columns, row_stride, column_stride, there):  # type: ignore[no-untyped-def]
    """A tile of numbers; zeros where nothing is."""
    return tl.load(start + rows[:, None] * row_stride + columns[None, :] * column_stride, mask=there, other=0)


@triton.jit
def walk(chunks, groups, H, slabs, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The stream of a program, where its chunk 0 lies, its first chunk and the one after the last."""
    stream = tl.program_id(0) // slabs
    row = stream.to(tl.int64)
    first = row * 0
    last = first + groups
    if PACKED:
        first = tl.load(chunks + stream // H)
        last = tl.load(chunks + stream // H + 1)
        row = row % H
    return stream.to(tl.int64), row * groups, first, last


@triton.jit
def chunk_decay(decay, cell, k, K: tl.constexpr, PER_CHANNEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """[K,1] or a number."""
    if PER_CHANNEL:
        return tl.load(decay + cell * K + k, mask=k < K, other=0)[:, None]
    else:  # noqa: RET505, Triton compiles both returns otherwise
        return tl.load(decay + cell)


@triton.jit(do_not_specialize=["groups"])
def carry_kernel(  # type: ignore[no-untyped-def]
    from_state, free, keys, decay, initial, chunks, states, delta, final,
    groups,
    H: tl.constexpr, C: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    KP: tl.constexpr, S: tl.constexpr, PER_CHANNEL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The state before each chunk, the deltas of its tokens and the state after the last."""
    ACC: tl.constexpr = states.dtype.element_ty
    slabs: tl.constexpr = (D + S - 1) // S
    stream, origin, first, last = walk(chunks, groups, H, slabs, PACKED)
    c = tl.arange(0, C)
    k = tl.arange(0, KP)
    d = tl.program_id(0) % slabs * S + tl.arange(0, S)
    in_state = (k < K)[:, None] & (d < D)[None, :]
    at_state = k[:, None] * D + d[None, :]
    state = tl.load(initial + stream * K * D + at_state, mask=in_state, other=0)
    for g in range(first, last):
        cell = origin + g
        tl.store(states + cell * K * D + at_state, state, mask=in_state)
        w = matrix(from_state + cell * C * K, c, k, K, 1, (k < K)[None, :])
        x = matrix(free + cell * C * D, c, d, D, 1, (d < D)[None, :])
        x -= tl.dot(w, state, input_precision="ieee", out_dtype=ACC)
        tl.store(delta + cell * C * D + c[:, None] * D + d[None, :], x, mask=(d < D)[None, :])
        transposed = matrix(keys + cell * C * K, k, c, 1, K, (k < K)[:, None])
        state = chunk_decay(decay, cell, k, K, PER_CHANNEL) * state
        state += tl.dot(transposed, x, input_precision="ieee", out_dtype=ACC)
    tl.store(final + stream * K * D + at_state, state, mask=in_state)


@triton.jit(do_not_specialize=["groups"])
def carry_backward_kernel(  # type: ignore[no-untyped-def]
    from_state, keys, decay, chunks, grad_states, grad_delta, grad_final, grads, grad_free, grad_initial,
    groups,
    H: tl.constexpr, C: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    KP: tl.constexpr, S: tl.constexpr, PER_CHANNEL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The gradients of the state after each chunk, of U and of the initial state."""
    ACC: tl.constexpr = grads.dtype.element_ty
    slabs: tl.constexpr = (D + S - 1) // S
    stream, origin, first, last = walk(chunks, groups, H, slabs, PACKED)
    c = tl.arange(0, C)
    k = tl.arange(0, KP)
    d = tl.program_id(0) % slabs * S + tl.arange(0, S)
    in_state = (k < K)[:, None] & (d < D)[None, :]
    at_state = k[:, None] * D + d[None, :]
    grad = tl.load(grad_final + stream * K * D + at_state, mask=in_state, other=0)
    for reverse in range(last - first):
        cell = origin + last - 1 - reverse
        tl.store(grads + cell * K * D + at_state, grad, mask=in_state)
        x = matrix(grad_delta + cell * C * D, c, d, D, 1, (d < D)[None, :])
        key = matrix(keys + cell * C * K, c, k, K, 1, (k < K)[None, :])
        x += tl.dot(key, grad, input_precision="ieee", out_dtype=ACC)
        tl.store(grad_free + cell * C * D + c[:, None] * D + d[None, :], x, mask=(d < D)[None, :])
        transposed = matrix(from_state + cell * C * K, k, c, 1, K, (k < K)[:, None])
        grad = chunk_decay(decay, cell, k, K, PER_CHANNEL) * grad
        grad += tl.load(grad_states + cell * K * D + at_state, mask=in_state, other=0)
        grad -= tl.dot(transposed, x, input_precision="ieee", out_dtype=ACC)
    tl.store(grad_initial + stream * K * D + at_state, grad, mask=in_state)
