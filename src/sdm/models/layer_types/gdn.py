"""Gated DeltaNet: the dense delta rule with decay, a small matrix per head."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from sdm.layers import GatedDeltaNet
from sdm.models.layer_types.base import LayerCost, LayerType, check_numbers, derived
from sdm.models.layer_types.shared import (
    DecayFields,
    DenseMemoryFields,
    InitialStateFields,
    KeyAids,
    check_key_aids,
    delta_flops,
    delta_net_cost,
    derive_dense_memory,
    shifted,
    tie_queries,
)

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig


@dataclass
class GatedDeltaNetFields(DenseMemoryFields, InitialStateFields, DecayFields, KeyAids):
    """Fields of GDN layers."""

    gdn_learned_initial_state: bool = False
    """Whether GDN starts from a learned state instead of zeros."""


class GatedDeltaNetType(LayerType):
    """Gated DeltaNet."""

    name = "gdn"
    scope = "global"
    fields: type = GatedDeltaNetFields
    ops = ("gated_delta_rule",)
    state_fields = ("num_attention_heads", "recurrent_key_dim", "short_convolution", "shift_keys", "key_convolution")
    free_fields: tuple[str, ...] = ("initial_state_std", "shift_convolution", "largest_decay_rate")

    def derive(self, config: "SDMConfig") -> None:
        """Check the fields of this layer type and fill in those that are None."""
        derive_dense_memory(config)
        check_key_aids(config)
        check_numbers(config, "initial_state_std")
        check_numbers(config, "largest_decay_rate", positive=True)

    def build(self, config: "SDMConfig") -> nn.Module:
        """Build the layer."""
        layer = GatedDeltaNet(
            config.hidden_size,
            derived(config.num_attention_heads),
            derived(config.recurrent_key_dim),
            config.gdn_learned_initial_state,
            conv_size=config.short_convolution,
            shift_convolution=config.shift_convolution,
            initial_state_std=config.initial_state_std,
            largest_decay_rate=config.largest_decay_rate,
            norm_eps=config.rms_norm_eps,
            backend=config.backend,
        )
        return shifted(layer, config)

    def cost(self, config: "SDMConfig") -> LayerCost:
        """Work out the cost of one layer."""
        heads, keys = derived(config.num_attention_heads), derived(config.recurrent_key_dim)
        flops = heads * delta_flops(keys, keys, config.hidden_size // heads)
        made = delta_net_cost(self.name, config, gates=2, vectors=2 * heads, memory_flops=flops)
        return replace(made, initial_state=made.state if config.gdn_learned_initial_state else 0)

    def initialize(self, layer: nn.Module, config: "SDMConfig") -> None:
        """Initialise what depends on other weights of the layer."""
        tie_queries(layer, config)
