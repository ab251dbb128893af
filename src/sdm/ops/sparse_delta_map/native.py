"""The map by the compiled core: pairs are counted first, then stored, so that memory is proportional to them."""

from __future__ import annotations

from functools import partial

import torch

from sdm.native import call_core, missing_because
from sdm.ops.backends import Backend
from sdm.ops.checks import available_memory
from sdm.ops.sparse_delta_map.inputs import MapCall, ReadMap


def sparse_delta_map_native(call: MapCall) -> ReadMap:
    """Serve a call of `sparse_delta_map`; the result does not depend on the number of threads."""
    tokens = call.tokens.to(call.dtype)
    batch, time, heads, writes = tokens.write_index.shape
    reads, rows = tokens.read_index.shape[-1], batch * heads * time
    offsets = torch.tensor([0, time]) if call.cu_seqlens is None else call.cu_seqlens.cpu().long()
    initial_weight = torch.zeros(batch, time, heads, reads, dtype=torch.float64)
    dropped = torch.zeros(batch, heads, time, dtype=torch.float64)
    row_pairs, row_offsets = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows + 1, dtype=torch.int64)
    run = partial(
        call_core,
        "sparse_delta_map",
        call.dtype,
        batch=batch,
        time=time,
        heads=heads,
        slots=call.num_slots,
        writes=writes,
        reads=reads,
        documents=len(offsets) - 1,
        decay_per_write=tokens.log_decay.dim() == 4,
        slot_update=call.update == "slot",
        threshold=call.threshold,
        write_index=tokens.write_index.long().contiguous(),
        write_weight=tokens.write_weight.contiguous(),
        beta=tokens.beta.contiguous(),
        log_decay=tokens.log_decay.contiguous(),
        read_index=tokens.read_index.long().contiguous(),
        read_weight=tokens.read_weight.contiguous(),
        cu_seqlens=offsets.contiguous(),
        initial_weight=initial_weight,
        dropped=dropped,
        row_pairs=row_pairs,
        row_offsets=row_offsets,
    )
    run(source=None, weight=None)
    torch.cumsum(row_pairs, 0, out=row_offsets[1:])
    pairs = int(row_offsets[-1])
    _check_memory(pairs, time)
    source, weight = torch.empty(pairs, dtype=torch.int32), torch.empty(pairs, dtype=torch.float64)
    if pairs:
        run(source=source, weight=weight)
    return ReadMap((batch, heads, time), row_offsets, source, weight, initial_weight, dropped)


def _check_memory(pairs: int, time: int) -> None:
    """Refuse a map that would take more than half of the free memory: it and a copy of it would not fit."""
    needed, free = 12.0 * pairs, available_memory(torch.device("cpu"))
    if 2 * needed > free:
        most = int(time * (free / (2 * needed)) ** 0.5)
        raise ValueError(
            f"a map of {time} tokens has {pairs:,} pairs, which take {needed / 1e9:.3g} GB; {free / 1e9:.3g} GB are "
            f"free, enough for about {most:,} tokens: take fewer, or fewer heads or layers at a time"
        )


def _unsupported_reason(call: MapCall) -> str | None:
    if call.dtype not in (torch.float32, torch.float64):
        return f"the compiled core computes in float32 or float64, got {call.dtype}"
    return None


NATIVE = Backend("native", sparse_delta_map_native, None, None, missing_because, _unsupported_reason)
