"""Mamba2: a selective state space, a small matrix per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from sdm.layers import Mamba2
from sdm.models.layer_types.base import LayerCost, LayerType, derived
from sdm.models.layer_types.shared import DenseMemoryFields, derive_dense_memory

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig


class Mamba2Type(LayerType):
    """Mamba2."""

    name = "mamba2"
    scope = "global"
    fields = DenseMemoryFields
    ops = ("state_space",)
    state_fields = ("num_attention_heads", "recurrent_key_dim", "short_convolution")

    def derive(self, config: SDMConfig) -> None:
        """Check the fields of this layer type and fill in those that are None."""
        derive_dense_memory(config)

    def check(self, config: SDMConfig) -> None:
        """Raise unless a model of this configuration can have such a layer."""
        if not config.short_convolution:
            raise ValueError("short_convolution must be at least 1 for mamba2, got 0")

    def build(self, config: SDMConfig) -> nn.Module:
        """Build the layer."""
        return Mamba2(
            config.hidden_size,
            derived(config.num_attention_heads),
            derived(config.recurrent_key_dim),
            conv_size=config.short_convolution,
            norm_eps=config.rms_norm_eps,
            backend=config.backend,
        )

    def cost(self, config: SDMConfig) -> LayerCost:
        """Work out the cost of one layer."""
        width, heads = config.hidden_size, derived(config.num_attention_heads)
        keys = derived(config.recurrent_key_dim)
        channels, convolved = width // heads, width + 2 * heads * keys
        matrix = heads * keys * channels
        return LayerCost(
            self.name,
            weights=3 * width * width + 2 * width * heads * keys + width * heads,
            vectors=3 * heads + width + convolved * (config.short_convolution + 1),
            state=matrix,
            convolution_state=convolved * (config.short_convolution - 1),
            state_moved=2 * matrix,
            # Decay, write and read; the step size times the value, and the value that skips the memory.
            memory_flops=heads * channels * (5 * keys + 3),
        )
