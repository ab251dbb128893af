"""What a `MemoryState` holds, layer by layer, in numbers to print.

Shapes: B batch, T time, H heads, N slots, W writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdm.layers.memory_statistics import evaluating, observed
from sdm.layers.sparse_delta_memory import SparseDeltaMemory
from sdm.models.fingerprint import base_model
from sdm.models.state import Memory, MemoryState, _tables
from sdm.ops.sparse_delta_rule.inputs import Tokens


@dataclass(frozen=True)
class LayerSummary:
    """The state of one layer."""

    index: int
    """Number of the block."""
    layer_type: str
    nbytes: int
    """Bytes that the state refers to, without M0."""
    norm: float
    """Length of all numbers of the state; of an SDM layer, of the difference to M0."""
    slots: int | None = None
    """Slots of an SDM layer, of all heads; None for other layers."""
    changed: int | None = None
    """How many of them differ from M0."""
    largest: float | None = None
    """The largest length of the difference of a row."""


def summarize_state(state: MemoryState, model: Any) -> list[LayerSummary]:
    """Describe the state of every layer of a model.

    Raises:
        ValueError: if the state is of another model.
    """
    state.check_model(model)
    summaries = []
    for index, (block, content) in enumerate(zip(base_model(model).layers, state._contents, strict=True)):
        kind = block.layer_type
        nbytes, squares = 0, 0.0
        table: Memory | None = None
        for x in content.values():
            if isinstance(x, Memory):
                table, nbytes = x, nbytes + sum(change.nbytes for change in x.changes)
            else:
                nbytes, squares = nbytes + x.nbytes, squares + float(x.double().square().sum())
        if table is None:
            summaries.append(LayerSummary(index, kind, nbytes, squares**0.5))
            continue
        merged = table.merged()
        start = table.start().reshape(-1, table.shape[-1])[merged.index].double()
        size = (merged.rows.double() - start).norm(dim=-1)
        heads, slots, _ = table.shape
        largest = float(size.max()) if len(size) else 0.0
        summaries.append(
            LayerSummary(index, kind, nbytes, float(size.norm()), heads * slots, len(merged.index), largest)
        )
    return summaries


@torch.no_grad()
def last_written(model: Any, input_ids: Tensor) -> dict[int, Tensor]:
    """Number the token of a text that wrote each slot last, [H,N] by the number of the SDM block; -1 for none.

    Args:
        model: an `sdm.SDMForCausalLM`.
        input_ids: [T] or [1,T], one text from its beginning.
    """
    base = base_model(model)
    written: dict[SparseDeltaMemory, Tensor] = {}

    def see(layer: SparseDeltaMemory, tokens: Tokens) -> None:
        time = torch.arange(tokens.write_index.shape[1])
        index_HTW = tokens.write_index[0].long().cpu().transpose(0, 1)
        last_HN = torch.full((layer.num_heads, layer.num_slots), -1, dtype=torch.int64)
        when = time.view(1, -1, 1).expand_as(index_HTW).flatten(1)
        written[layer] = last_HN.scatter_reduce(1, index_HTW.flatten(1), when, "amax")

    with evaluating(base), observed(base, see):
        base(input_ids=input_ids.reshape(1, -1).to(base.device), use_cache=False)
    return {
        index: written[memory]
        for index, block in enumerate(base.layers)
        for memory in _tables(block.mixer).values()
        if memory in written
    }
