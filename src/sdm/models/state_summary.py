"""What a `MemoryState` holds, layer by layer, in numbers to print.

Shapes: T time, H heads, N slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sdm.layers.memory_statistics import WritesLeft, evaluating, last_writes, observed, writes_left
from sdm.layers.sparse_delta_memory import SparseDeltaMemory
from sdm.models.cache import SDMCache
from sdm.models.fingerprint import base_model
from sdm.models.state import Memory, MemoryState, _tables
from sdm.ops.sparse_delta_rule.inputs import Tokens

SAME = 0.05
"""Two memories of one text differ by less than this share of their change: rounding, not another text."""


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


def summarize_state(state: MemoryState, model: nn.Module) -> list[LayerSummary]:
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


@dataclass(frozen=True, eq=False)
class LayerWrites:
    """What a text wrote into an SDM layer, and what is left of it after its last token."""

    last: Tensor
    """[H,N] the token of the text that wrote each slot last; -1 for none."""
    left: WritesLeft
    """Of every write of the text."""


@torch.no_grad()
def stream_writes(
    model: nn.Module, input_ids: Tensor, since: MemoryState | None = None, expected: MemoryState | None = None
) -> dict[int, LayerWrites]:
    """Run a model on a text and tell what became of its writes, by the number of the SDM block.

    Args:
        model: an `sdm.SDMForCausalLM`.
        input_ids: [T] or [1,T], one text.
        since: the state of an earlier text to go on from; None begins a new one. It is not changed.
        expected: the state that the text must lead to, but for rounding; None takes any.

    Raises:
        ValueError: if the text leads to another state than the expected one.
    """
    base = base_model(model)
    observed_tokens: dict[SparseDeltaMemory, Tokens] = {}
    cache = SDMCache(base.config) if since is None else since.cache(model)
    with evaluating(base), observed(base, observed_tokens.__setitem__):
        base(input_ids=input_ids.reshape(1, -1).to(base.device), past_key_values=cache, use_cache=True)
    if expected is not None:
        reached = MemoryState.from_cache(model, cache)
        sizes = {layer.index: layer.norm for layer in summarize_state(expected, model)}
        for index, rows in expected.diff(reached).items():
            if float(rows.change.norm()) > SAME * max(sizes[index], 1e-12):
                raise ValueError(
                    f"the text is not what the state has read: it leads to another memory in layer {index}"
                )
    writes = {}
    for index, block in enumerate(base.layers):
        for memory in _tables(block.mixer).values():
            tokens = observed_tokens[memory]
            left = writes_left(tokens, memory.num_slots, memory.update)
            writes[index] = LayerWrites(last_writes(tokens, memory.num_slots), left)
    return writes
