"""DeltaNet: the dense delta rule without decay; without its correction, linear attention."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from sdm.layers import GatedDeltaNet
from sdm.models.layer_types.base import LayerCost, LayerType, derived
from sdm.models.layer_types.shared import (
    DenseMemoryFields,
    KeyAids,
    check_key_aids,
    delta_net_cost,
    derive_dense_memory,
    shifted,
    tie_queries,
)
from sdm.ops.backends import check_backend

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig


@dataclass
class DeltaNetFields(DenseMemoryFields, KeyAids):
    """Fields of DeltaNet layers."""

    deltanet_correction: bool = True
    """Whether DeltaNet erases what a key held before it writes; False makes it linear attention."""


class DeltaNetType(LayerType):
    """DeltaNet, or linear attention if `deltanet_correction` is off."""

    name = "deltanet"
    scope = "global"
    fields = DeltaNetFields
    state_fields = ("num_attention_heads", "recurrent_key_dim", "short_convolution", "shift_keys", "key_convolution")
    free_fields = ("shift_convolution",)

    def derive(self, config: "SDMConfig") -> None:
        """Check the fields of this layer type and fill in those that are None."""
        derive_dense_memory(config)
        check_key_aids(config)

    def check(self, config: "SDMConfig") -> None:
        """Raise unless a model of this configuration can have such a layer."""
        check_backend(config.backend, "gated_delta_rule" if config.deltanet_correction else "state_space")

    def build(self, config: "SDMConfig") -> nn.Module:
        """Build the layer."""
        layer = GatedDeltaNet(
            config.hidden_size,
            derived(config.num_attention_heads),
            derived(config.recurrent_key_dim),
            conv_size=config.short_convolution,
            shift_convolution=config.shift_convolution,
            norm_eps=config.rms_norm_eps,
            decay=False,
            correction=config.deltanet_correction,
            backend=config.backend,
        )
        return shifted(layer, config)

    def cost(self, config: "SDMConfig") -> LayerCost:
        """Work out the cost of one layer."""
        keys = derived(config.recurrent_key_dim)
        # Write and read are 2 each per element; the correction retrieves and subtracts.
        per_channel = 4 * keys + 1 + (2 * keys + 1 if config.deltanet_correction else 0)
        return delta_net_cost(self.name, config, gates=1, memory_flops=config.hidden_size * per_channel)

    def initialize(self, layer: nn.Module, config: "SDMConfig") -> None:
        """Initialise what depends on other weights of the layer."""
        tie_queries(layer, config)
