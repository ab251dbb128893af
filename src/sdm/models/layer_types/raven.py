"""Raven: attention over a few slots that a router writes to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from sdm.layers import Raven
from sdm.layers.raven import default_slot_sizes
from sdm.models.layer_types.base import LayerCost, LayerType, check_sizes, derived
from sdm.models.layer_types.shared import (
    KeyAids,
    check_key_aids,
    shifted,
    shifted_parameters,
    shifted_state,
    tie_queries,
)

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig


@dataclass
class RavenFields(KeyAids):
    """Fields of Raven layers."""

    raven_key_dim: int | None = None
    """Key channels per head of Raven. Derived: head_dim / 4."""
    raven_slots: int | None = None
    """Slots per head of Raven. Derived: head_dim / 2."""
    raven_writes: int | None = None
    """Slots that a token is written to, per head. Derived: an eighth of raven_slots, at least 2."""


class RavenType(LayerType):
    """Raven."""

    name = "raven"
    scope = "global"
    fields = RavenFields
    ops = ("slot_attention",)
    state_fields = ("num_attention_heads", "raven_key_dim", "raven_slots", "shift_keys", "key_convolution")

    def derive(self, config: "SDMConfig") -> None:
        """Check the fields of this layer type and fill in those that are None."""
        check_sizes(config, "raven_key_dim", "raven_slots", "raven_writes")
        check_key_aids(config)
        config.raven_key_dim, config.raven_slots, config.raven_writes = default_slot_sizes(
            derived(config.head_dim), config.raven_key_dim, config.raven_slots, config.raven_writes
        )
        if config.raven_writes > config.raven_slots:
            raise ValueError(
                f"raven_writes = {config.raven_writes} exceeds raven_slots = {config.raven_slots}; lower it"
            )

    def build(self, config: "SDMConfig") -> nn.Module:
        """Build the layer."""
        layer = Raven(
            config.hidden_size,
            derived(config.num_attention_heads),
            config.raven_key_dim,
            config.raven_slots,
            config.raven_writes,
            norm_eps=config.rms_norm_eps,
            backend=config.backend,
        )
        return shifted(layer, config)

    def initialize(self, layer: nn.Module, config: "SDMConfig") -> None:
        """Initialise what depends on other weights of the layer."""
        tie_queries(layer, config)

    def cost(self, config: "SDMConfig") -> LayerCost:
        """Work out the cost of one layer."""
        width, heads = config.hidden_size, derived(config.num_attention_heads)
        keys, slots, writes = derived(config.raven_key_dim), derived(config.raven_slots), derived(config.raven_writes)
        row = keys + width // heads
        return LayerCost(
            self.name,
            weights=3 * width * width + width * heads * (2 * keys + slots + 1),
            vectors=2 * heads + 2 * keys + width // heads + shifted_parameters(config),
            state=heads * slots * row,
            convolution_state=shifted_state(config),
            state_moved=heads * (slots + writes) * row,
            # Scores, softmax and weighted sum over all slots; the slots that are written take 3 per element.
            memory_flops=heads * (slots * (2 * row + 3) + 3 * writes * row),
            addressing_flops=heads * (slots + 3 * writes),
        )
