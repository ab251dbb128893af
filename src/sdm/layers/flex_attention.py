"""Attention to an interval of earlier tokens by torch's flex_attention, which GPUs compile to one kernel.

Who sees whom is worked out on the device from the length of each token's interval: nothing waits for the host, no mask
over all pairs is made, and blocks of keys that no query of a block sees are skipped.

Shapes: B batch, T queries, L keys (the last T of them the queries' own), H query heads, G key-value heads, D channels.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdm.ops.triton.availability import missing_because, version

BLOCK = 128
_failures: list[Exception] = []
logger = logging.getLogger(__name__)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serves(query_BTHD: Tensor) -> bool:
    """Whether attention of these queries goes through flex_attention: on GPUs with Triton, for the sizes it has."""
    channels = query_BTHD.shape[-1]
    return (
        query_BTHD.device.type in ("cuda", "xpu", "meta")
        and query_BTHD.dtype in DTYPES
        and channels >= 16
        and channels & (channels - 1) == 0
        and not torch.compiler.is_exporting()
        and not missing_because(version())
        and not _failures
    )


def interval_attention(query_BTHD: Tensor, key_BLGD: Tensor, value_BLGD: Tensor, visible_BT: Tensor) -> Tensor | None:
    """Attention of query t, which lies at place L - T + t of the keys, to the `visible` last places up to its own.

    Returns:
        [B,T,H,D]; or None if torch cannot compile its kernel here, which is said once.
    """
    try:
        return _interval_attention(query_BTHD, key_BLGD, value_BLGD, visible_BT)
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        _failures.append(error)
        logger.warning("torch cannot compile flex_attention, and masked attention is slower: %s", error)
        return None


def _interval_attention(query_BTHD: Tensor, key_BLGD: Tensor, value_BLGD: Tensor, visible_BT: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import BlockMask

    time = query_BTHD.shape[1]
    if time == 0:
        return query_BTHD
    history = key_BLGD.shape[1] - time

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q + history - k
        return (distance >= 0) & (distance < visible_BT[b, q])

    counts, indices = _blocks(visible_BT, history)
    blocks = BlockMask.from_kv_blocks(
        counts[:, None], indices[:, None], BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(time, key_BLGD.shape[1])
    )
    query, key, value = (x.transpose(1, 2) for x in (query_BTHD, key_BLGD, value_BLGD))
    grouped = key.shape[1] != query.shape[1]
    mixed: Tensor = _attention(query)(query, key, value, block_mask=blocks, enable_gqa=grouped)
    return mixed.transpose(1, 2)


def _blocks(visible_BT: Tensor, history: int) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries sees, [B,N], and which: [B,N,M] of which the first count."""
    time = visible_BT.shape[1]
    queries, keys = -(-time // BLOCK), -(-(time + history) // BLOCK)
    own = torch.arange(queries * BLOCK, device=visible_BT.device) + history
    # Queries that only fill up the last block see nothing, and begin nowhere before the others.
    begin = torch.nn.functional.pad(own[:time] + 1 - visible_BT, (0, queries * BLOCK - time), value=time + history)
    first = begin.unflatten(1, (queries, BLOCK)).amin(-1).clamp(min=0) // BLOCK
    last = own.view(queries, BLOCK)[:, -1].clamp(max=time + history - 1) // BLOCK
    place = torch.arange(keys, device=visible_BT.device)
    counts = (last + 1 - first).to(torch.int32)
    return counts, (first.unsqueeze(-1) + place).clamp(max=keys - 1).to(torch.int32)


def _attention(query: Tensor) -> Callable[..., Any]:
    """torch's function, compiled where a GPU would otherwise hold scores of all pairs."""
    from torch.nn.attention.flex_attention import flex_attention

    if query.device.type in ("cuda", "xpu") and not torch.compiler.is_compiling():
        return _compiled()
    return flex_attention


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
