"""Kimi Delta Attention: Gated DeltaNet with a decay for each key channel."""

import dataclasses
from typing import TYPE_CHECKING

from torch import nn

from sdm.layers import KimiDeltaAttention
from sdm.models.layer_types.base import LayerCost, check_sizes, derived
from sdm.models.layer_types.gdn import GatedDeltaNetType
from sdm.models.layer_types.shared import DenseMemoryFields, KeyAids, shifted

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig


@dataclasses.dataclass
class KimiFields(DenseMemoryFields, KeyAids):
    """Fields of KDA layers."""

    kda_decay_rank: int | None = None
    """Rank of the projection of KDA's decays. Derived: head_dim."""


class KimiType(GatedDeltaNetType):
    """Kimi Delta Attention."""

    name = "kda"
    fields = KimiFields
    free_fields = ("shift_convolution",)

    def derive(self, config: "SDMConfig") -> None:
        """Check the fields of this layer type and fill in those that are None."""
        super().derive(config)
        check_sizes(config, "kda_decay_rank")
        config.kda_decay_rank = config.kda_decay_rank or config.head_dim

    def build(self, config: "SDMConfig") -> nn.Module:
        """Build the layer."""
        layer = KimiDeltaAttention(
            config.hidden_size,
            derived(config.num_attention_heads),
            derived(config.recurrent_key_dim),
            decay_rank=derived(config.kda_decay_rank),
            conv_size=config.short_convolution,
            shift_convolution=config.shift_convolution,
            norm_eps=config.rms_norm_eps,
            backend=config.backend,
        )
        return shifted(layer, config)

    def cost(self, config: "SDMConfig") -> LayerCost:
        """Work out the cost of one layer."""
        gdn, width, rank = super().cost(config), config.hidden_size, derived(config.kda_decay_rank)
        heads = derived(config.num_attention_heads)
        keys = heads * derived(config.recurrent_key_dim)
        return dataclasses.replace(
            gdn,
            weights=gdn.weights - width * heads + rank * (width + keys),
            vectors=gdn.vectors - heads + keys,
            initial_state=0,
        )
