"""Sparse Delta Memory: a large table per head, written and read in a few slots found by product keys."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from sdm.layers import SparseDeltaMemory
from sdm.layers.sizes import check_slots, default_slots
from sdm.models.layer_types.base import (
    LayerCost,
    LayerType,
    check_choices,
    check_numbers,
    check_sizes,
    derived,
    selection_flops,
)
from sdm.models.layer_types.shared import (
    DecayFields,
    InitialStateFields,
    KeyAids,
    check_key_aids,
    delta_flops,
    shifted,
    shifted_parameters,
    shifted_state,
    tie_queries,
)

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig


@dataclass
class SparseMemoryFields(InitialStateFields, DecayFields, KeyAids):
    """Fields of SDM layers."""

    num_memory_heads: int = 1
    """Heads of an SDM layer. Fewer heads make a larger memory at the same cost."""
    num_slots: int | None = None
    """Slots per head, a perfect square. Derived: (hidden_size / (4 num_memory_heads))^2."""
    num_writes: int | None = None
    """Slots that a token writes, per head. Derived: 64, or all slots if there are fewer."""
    num_reads: int | None = None
    """Slots that a token reads, per head. Derived as num_writes."""
    learned_initial_state: bool = True
    """Whether SDM starts from a learned memory M0 instead of zeros."""
    memory_update: Literal["delta", "slot"] = "delta"
    """Rule of a write: "delta" compares the value with the weighted sum of the written slots, "slot" with each slot."""
    memory_weighting: Literal["softmax", "l2"] = "softmax"
    """How selected scores become weights."""
    memory_temperature: float | int = 1.0
    """Temperature of the softmax of memory_weighting."""
    memory_output_gate: Literal["sigmoid", "silu"] = "sigmoid"
    """Activation of the gate on what is read."""
    decay_per_write: bool = False
    """Weight the decay of each written slot by its share of the write."""
    normalize_scores: bool = False
    """RMS-normalise the scores that address the memory."""
    query_batch_norm: bool = False
    """Batch-normalise the read scores."""


class SparseMemoryType(LayerType):
    """Sparse Delta Memory."""

    name = "sdm"
    scope = "global"
    fields = SparseMemoryFields
    ops = ("sparse_delta_rule", "product_key_topk")
    state_fields = ("num_memory_heads", "num_slots", "shift_keys", "key_convolution")
    free_fields = ("initial_state_std", "largest_decay_rate")

    def derive(self, config: "SDMConfig") -> None:
        """Check the fields of this layer type and fill in those that are None."""
        check_sizes(config, "num_memory_heads", "num_slots", "num_writes", "num_reads")
        check_numbers(config, "initial_state_std")
        check_numbers(config, "largest_decay_rate", positive=True)
        check_key_aids(config)
        check_numbers(config, "memory_temperature", positive=True)
        check_choices(
            config,
            memory_update=("delta", "slot"),
            memory_weighting=("softmax", "l2"),
            memory_output_gate=("sigmoid", "silu"),
        )
        width, heads = config.hidden_size, config.num_memory_heads
        config.num_slots = config.num_slots or default_slots(width, heads)
        config.num_writes = config.num_writes or min(64, config.num_slots)
        config.num_reads = config.num_reads or min(64, config.num_slots)
        counts = {"num_writes": config.num_writes, "num_reads": config.num_reads}
        check_slots(width, {"num_memory_heads": heads}, {"num_slots": config.num_slots}, **counts)

    def build(self, config: "SDMConfig") -> nn.Module:
        """Build the layer."""
        layer = SparseDeltaMemory(
            config.hidden_size,
            config.num_memory_heads,
            derived(config.num_slots),
            derived(config.num_writes),
            derived(config.num_reads),
            config.learned_initial_state,
            initial_state_std=config.initial_state_std,
            largest_decay_rate=config.largest_decay_rate,
            update=config.memory_update,
            weighting=config.memory_weighting,
            temperature=config.memory_temperature,
            decay_per_write=config.decay_per_write,
            normalize_scores=config.normalize_scores,
            query_batch_norm=config.query_batch_norm,
            output_gate=config.memory_output_gate,
            norm_eps=config.rms_norm_eps,
            backend=config.backend,
        )
        return shifted(layer, config)

    def cost(self, config: "SDMConfig") -> LayerCost:
        """Work out the cost of one layer."""
        width, heads, slots = config.hidden_size, config.num_memory_heads, derived(config.num_slots)
        writes, reads = derived(config.num_writes), derived(config.num_reads)
        side, channels = math.isqrt(slots), width // heads
        vectors = 2 * heads + channels + shifted_parameters(config)
        if config.normalize_scores:
            vectors += 2 * side
        if config.query_batch_norm:
            vectors += 4 * heads * side
        table = heads * slots * channels
        return LayerCost(
            self.name,
            weights=3 * width * width + 4 * width * heads * side + 2 * width * heads,
            vectors=vectors,
            initial_state=table if config.learned_initial_state else 0,
            state=table,
            convolution_state=shifted_state(config),
            state_moved=heads * channels * (2 * writes + reads),
            memory_flops=heads * delta_flops(writes, reads, channels),
            addressing_flops=heads * (selection_flops(side, writes) + selection_flops(side, reads)),
        )

    def initialize(self, layer: nn.Module, config: "SDMConfig") -> None:
        """Initialise what depends on other weights of the layer."""
        tie_queries(layer, config)
