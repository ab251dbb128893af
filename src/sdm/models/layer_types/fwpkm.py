"""FwPKM: a table found by product keys whose rows take a gradient step after each chunk of tokens."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from sdm.layers import FastWeightMemory
from sdm.layers.sizes import check_slots, default_slots
from sdm.models.layer_types.base import LayerCost, LayerType, check_sizes, derived, selection_flops

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig


@dataclass
class FastWeightFields:
    """Fields of FwPKM layers."""

    fwpkm_slots: int | None = None
    """Slots of FwPKM, a perfect square. Derived: (hidden_size / 4)^2, as SDM's."""
    fwpkm_reads: int | None = None
    """Slots that a token reads of FwPKM. Derived: 8, or all slots if there are fewer."""
    fwpkm_key_dim: int | None = None
    """Channels of FwPKM's queries and keys, both halves together. Derived: hidden_size."""
    fwpkm_chunk: int = 64
    """Tokens between two writes of FwPKM."""


class FastWeightType(LayerType):
    """Fast-weight product-key memory."""

    name = "fwpkm"
    scope = "global"
    fields = FastWeightFields
    ops = ("product_key_topk",)
    state_fields = ("fwpkm_slots", "fwpkm_key_dim", "fwpkm_chunk")

    def derive(self, config: "SDMConfig") -> None:
        """Check the fields of this layer type and fill in those that are None."""
        check_sizes(config, "fwpkm_slots", "fwpkm_reads", "fwpkm_key_dim", "fwpkm_chunk")
        config.fwpkm_slots = config.fwpkm_slots or default_slots(config.hidden_size, 1)
        config.fwpkm_reads = config.fwpkm_reads or min(8, config.fwpkm_slots)
        config.fwpkm_key_dim = config.fwpkm_key_dim or config.hidden_size + config.hidden_size % 2
        if config.fwpkm_key_dim % 2:
            raise ValueError(f"fwpkm_key_dim must be even, for two halves, got {config.fwpkm_key_dim}")
        slots = {"fwpkm_slots": config.fwpkm_slots}
        check_slots(config.hidden_size, {"heads": 1}, slots, fwpkm_reads=config.fwpkm_reads)

    def build(self, config: "SDMConfig") -> nn.Module:
        """Build the layer."""
        return FastWeightMemory(
            config.hidden_size,
            config.fwpkm_slots,
            derived(config.fwpkm_reads),
            config.fwpkm_key_dim,
            config.fwpkm_chunk,
            norm_eps=config.rms_norm_eps,
            backend=config.backend,
        )

    def cost(self, config: "SDMConfig") -> LayerCost:
        """Work out the cost of one layer; the write of a chunk is spread over its tokens."""
        width, chunk = config.hidden_size, config.fwpkm_chunk
        slots, reads, keys = (derived(size) for size in (config.fwpkm_slots, config.fwpkm_reads, config.fwpkm_key_dim))
        side, features = math.isqrt(slots), keys + width + 2
        return LayerCost(
            self.name,
            weights=2 * width * width + width * (keys + 8),
            vectors=2 * width + keys + 8 + side * keys,
            state=slots * width + side * keys + chunk * features,
            # A token reads rows and all keys, and is kept; a chunk reads and writes its rows and keys.
            state_moved=3 * reads * width + side * keys + 2 * features + 2 * side * keys // chunk,
            # Reading 2 and writing 4 per element of a row.
            memory_flops=6 * reads * width + 3 * width,
            # Distances of all keys, 3 per element; the step of the keys as much again and a product.
            addressing_flops=8 * side * keys + selection_flops(side, reads),
        )
