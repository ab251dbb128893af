"""Which writes a reading consists of: the exact attention map of a sparse delta memory.

The reading of a token is linear in the rows that the memory started with and in the writes since then::

    y[t] = sum_j q[t,j] L_j(start,t) M_0[j]  +  sum_{l <= t} S[t,l] delta[l]
    S[t,l] = sum over slots j that t reads and l wrote of  q[t,j] k[l,j] L_j(l,t)

`delta[l]` is what token l adds to its slots, before their weights, and L_j(l,t) the product of the factors that scale
slot j in the writes after l, up to t: `exp(g)` for the delta rule, `exp(g) (1 - beta k_j)` for the slot rule. S depends
on addresses and gates, not on values, and is sparse: two tokens that share no slot have no entry.

Shapes: B batch, T time, H heads, W writes, R reads, N slots, D value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.ops.backends import BACKENDS, serve
from sdm.ops.sparse_delta_map.inputs import MapCall, ReadMap
from sdm.ops.sparse_delta_map.native import NATIVE
from sdm.ops.sparse_delta_map.reference import REFERENCE
from sdm.ops.sparse_delta_rule import sparse_delta_rule
from sdm.ops.sparse_delta_rule.inputs import Tokens, check_shapes, check_values

__all__ = ["ReadMap", "sparse_delta_map", "sparse_delta_writes"]

BACKENDS["sparse_delta_map"] = [NATIVE, REFERENCE]


@torch.no_grad()
def sparse_delta_map(
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    *,
    num_slots: int,
    cu_seqlens: Tensor | None = None,
    update: str = "delta",
    threshold: float = 0.0,
    backend: str = "auto",
) -> ReadMap:
    """Map each reading of `sparse_delta_rule` to the writes and the initial rows that it consists of.

    Args:
        write_index, write_weight, value, beta, log_decay, read_index, read_weight: as for `sparse_delta_rule`.
        num_slots: N.
        cu_seqlens: [documents + 1] offsets of documents packed into one row (B = 1).
        update: "delta" or "slot".
        threshold: leave out the pairs with |S[t,l]| below this share of their row's sum of |S|; 0 keeps all.
        backend: "auto", "native" (C++; tensors of other devices are copied to the CPU) or "reference" (takes N x T
            numbers for each stream).

    Returns:
        A `ReadMap` on the CPU, in float64.
    """
    tokens = Tokens(write_index, write_weight, value, beta, log_decay, read_index, read_weight)
    check_shapes(tokens, None, num_slots, cu_seqlens, update)
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must lie in [0, 1), the share of a row's mass, got {threshold}")
    tokens = Tokens(*(x.detach().cpu() for x in tokens))
    check_values(tokens, num_slots)
    result: ReadMap = serve("sparse_delta_map", backend, MapCall(tokens, num_slots, cu_seqlens, update, threshold))
    return result


@torch.no_grad()
def sparse_delta_writes(
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    *,
    initial_state: Tensor | None = None,
    num_slots: int | None = None,
    cu_seqlens: Tensor | None = None,
    update: str = "delta",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `sparse_delta_rule` reads and what it writes.

    Each token is run as two: the first decays the slots and reads them with the write's own weights, the second writes.

    Args:
        write_index, ..., backend: as for `sparse_delta_rule`.

    Returns:
        The readings y [B,T,H,D], delta [B,T,H,D], and the final state [B or documents,H,N,D].
    """
    tokens = Tokens(write_index, write_weight, value, beta, log_decay, read_index, read_weight)
    check_shapes(tokens, initial_state, num_slots, cu_seqlens, update)
    num_writes, num_reads = write_index.shape[-1], read_index.shape[-1]
    addresses = max(num_writes, num_reads)

    def interleave(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack((first, second), dim=2).flatten(1, 2)

    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, addresses - x.shape[-1]))

    twice = Tokens(
        write_index=interleave(write_index, write_index),
        write_weight=interleave(write_weight, write_weight),
        value=interleave(value, value),
        beta=interleave(torch.zeros_like(beta), beta),
        log_decay=interleave(log_decay, torch.zeros_like(log_decay)),
        read_index=interleave(padded(write_index), padded(read_index)),
        read_weight=interleave(padded(write_weight), padded(read_weight)),
    )
    readings, final_state = sparse_delta_rule(
        *twice,
        initial_state=initial_state,
        num_slots=num_slots,
        output_final_state=True,
        cu_seqlens=None if cu_seqlens is None else 2 * cu_seqlens,
        update=update,
        backend=backend,
    )
    assert final_state is not None
    retrieved, y = readings.unflatten(1, (-1, 2)).unbind(2)
    delta = beta.unsqueeze(-1) * (value - retrieved if update == "delta" else value)
    return y, delta, final_state
