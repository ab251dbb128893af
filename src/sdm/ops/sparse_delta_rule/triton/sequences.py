"""Where the tokens of a program are: kernel helpers.

Tokens are counted over the whole batch: row b of a batch has the tokens b*T ... (b+1)*T - 1, a packed document those
that cu_seqlens says. A cell is a token of a head. Offsets are of 64 bits from the cell on.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_bounds(cu_seqlens, sequence, time, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """First token and the one after the last. Offsets that make no sense lead nowhere outside of the row."""
    if PACKED:
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
        end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
        start = tl.minimum(tl.maximum(start, 0), time)
        end = tl.minimum(tl.maximum(end, start), time)
    else:
        start = sequence.to(tl.int64) * time
        end = start + time
    return start, end


@triton.jit
def chunk_bounds(cu_seqlens, chunk, documents, time, C: tl.constexpr, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """First token of a chunk, the end of its sequence, and the number of the sequence.

    Document s owns the numbers cu_seqlens[s] // C + s and up: one more than it could need, so that nobody has to know
    how many chunks the documents before it have.
    """
    if PACKED:
        low = chunk * 0
        high = low + documents
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(cu_seqlens + middle).to(tl.int64) // C + middle <= chunk:
                low = middle
            else:
                high = middle
        start, end = sequence_bounds(cu_seqlens, low, time, PACKED)
        sequence = low
        first = start + (chunk - (start // C + low)) * C
    else:
        chunks = tl.cdiv(time, C)
        sequence = chunk // chunks
        start, end = sequence_bounds(cu_seqlens, sequence, time, PACKED)
        first = start + (chunk % chunks) * C
    return first, end, sequence


@triton.jit
def at_cell(pointer, first, head, H, size):  # type: ignore[no-untyped-def]
    """Where a chunk's first token has its numbers. Within a chunk 32 bits are enough."""
    return pointer + (first * H + head) * size


@triton.jit
def below(x, SIZE: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """x < SIZE, for an x that counts up to the next multiple of PADDED. Where that is SIZE there is nothing to compare,
    and no mask that would take registers."""
    if SIZE % PADDED == 0:
        inside = tl.full(x.shape, 1, tl.int1)
    else:
        inside = x < SIZE
    return inside
