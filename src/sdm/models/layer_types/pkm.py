"""A static product-key memory: a learned table that is read and never written."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from sdm.layers import ProductKeyMemory
from sdm.layers.sizes import check_slots, default_slots
from sdm.models.layer_types.base import LayerCost, LayerType, check_sizes, derived, selection_flops

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig


@dataclass
class ProductKeyFields:
    """Fields of static product-key memories."""

    pkm_heads: int = 1
    """Tables of a static product-key memory."""
    pkm_slots: int | None = None
    """Slots of each, a perfect square. Derived: (hidden_size / (4 pkm_heads))^2, as SDM's."""
    pkm_reads: int | None = None
    """Slots that a token reads of each. Derived: 64, or all slots if there are fewer."""


class ProductKeyType(LayerType):
    """Static product-key memory: a learned table that is read and never written."""

    name = "pkm"
    scope = "global"
    fields = ProductKeyFields
    ops = ("product_key_topk",)

    def derive(self, config: "SDMConfig") -> None:
        """Check the fields of this layer type and fill in those that are None."""
        check_sizes(config, "pkm_heads", "pkm_slots", "pkm_reads")
        width, heads = config.hidden_size, config.pkm_heads
        config.pkm_slots = config.pkm_slots or default_slots(width, heads)
        config.pkm_reads = config.pkm_reads or min(64, config.pkm_slots)
        check_slots(width, {"pkm_heads": heads}, {"pkm_slots": config.pkm_slots}, pkm_reads=config.pkm_reads)

    def build(self, config: "SDMConfig") -> nn.Module:
        """Build the layer."""
        return ProductKeyMemory(
            config.hidden_size,
            config.pkm_heads,
            config.pkm_slots,
            derived(config.pkm_reads),
            table_std=config.initializer_range,
            norm_eps=config.rms_norm_eps,
            backend=config.backend,
        )

    def reach(self, config: "SDMConfig") -> int:
        """Number of earlier tokens that a token sees through this layer."""
        return 0

    def cost(self, config: "SDMConfig") -> LayerCost:
        """Work out the cost of one layer."""
        width, heads = config.hidden_size, config.pkm_heads
        slots, reads = derived(config.pkm_slots), derived(config.pkm_reads)
        side = math.isqrt(slots)
        return LayerCost(
            self.name,
            weights=2 * width * width + 2 * width * heads * side,
            vectors=width // heads,
            table=slots * width,
            state_moved=reads * width,
            memory_flops=2 * reads * width,
            addressing_flops=heads * selection_flops(side, reads),
        )
