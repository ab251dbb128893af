"""Gated DeltaNet: the dense delta rule with decay, a small matrix per head."""

from dataclasses import dataclass
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
    derive_dense_memory,
    shifted,
    shifted_parameters,
    shifted_state,
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
        width, heads = config.hidden_size, derived(config.num_attention_heads)
        keys = derived(config.recurrent_key_dim)
        channels, convolved = width // heads, width + 2 * heads * keys
        matrix = heads * keys * channels
        return LayerCost(
            self.name,
            weights=3 * width * width + 2 * width * heads * keys + 2 * width * heads,
            vectors=2 * heads + channels + convolved * config.short_convolution + shifted_parameters(config),
            initial_state=matrix if config.gdn_learned_initial_state else 0,
            state=matrix,
            convolution_state=convolved * max(0, config.short_convolution - 1) + shifted_state(config),
            state_moved=2 * matrix,
            memory_flops=heads * delta_flops(keys, keys, channels),
        )

    def initialize(self, layer: nn.Module, config: "SDMConfig") -> None:
        """Initialise what depends on other weights of the layer."""
        tie_queries(layer, config)
