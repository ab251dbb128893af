"""Sliding-window and full attention."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from sdm.layers import FullAttention, SlidingWindowAttention
from sdm.layers.sizes import default_kv_heads
from sdm.models.layer_cost import LayerCost
from sdm.models.layer_types.base import LayerType, check_sizes, derived
from sdm.models.rope import rope_of

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig


@dataclass
class WindowFields:
    """Fields of sliding-window attention."""

    sliding_window: int = 128
    """Tokens that sliding-window attention sees, the current one included."""


@dataclass
class FullAttentionFields:
    """Fields of full attention."""

    num_key_value_heads: int | None = None
    """Key-value heads of full attention. Derived: half of num_attention_heads, or the nearest number that divides
    them."""


class SlidingAttentionType(LayerType):
    """Sliding-window attention: a token sees the last `sliding_window` tokens."""

    name = "sliding_attention"
    scope = "local"
    fields = WindowFields
    state_fields = ("num_attention_heads", "sliding_window")

    def derive(self, config: "SDMConfig") -> None:
        """Check the fields of this layer type and fill in those that are None."""
        check_sizes(config, "sliding_window")

    def build(self, config: "SDMConfig") -> nn.Module:
        """Build the layer."""
        rope = rope_of(config, self.name)
        return SlidingWindowAttention(
            config.hidden_size, derived(config.num_attention_heads), config.sliding_window, rope=rope
        )

    def reach(self, config: "SDMConfig") -> int:
        """Number of earlier tokens that a token sees through this layer."""
        return config.sliding_window - 1

    def cost(self, config: "SDMConfig") -> LayerCost:
        """Work out the cost of one layer."""
        return _cost(config, self.name, derived(config.num_attention_heads), config.sliding_window)


class FullAttentionType(LayerType):
    """Full attention: a token sees all tokens, whose keys and values are kept."""

    name = "full_attention"
    scope = "global"
    fields = FullAttentionFields
    state_fields = ("num_attention_heads", "num_key_value_heads")
    bounded_state = False

    def derive(self, config: "SDMConfig") -> None:
        """Check the fields of this layer type and fill in those that are None."""
        check_sizes(config, "num_key_value_heads")
        heads = derived(config.num_attention_heads)
        if config.num_key_value_heads is None:
            config.num_key_value_heads = default_kv_heads(heads)
        elif heads % config.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {heads} must be divisible by num_key_value_heads = {config.num_key_value_heads}"
            )

    def build(self, config: "SDMConfig") -> nn.Module:
        """Build the layer."""
        rope = rope_of(config, self.name)
        return FullAttention(
            config.hidden_size, derived(config.num_attention_heads), config.num_key_value_heads, rope=rope
        )

    def cost(self, config: "SDMConfig") -> LayerCost:
        """Work out the cost of one layer."""
        return _cost(config, self.name, derived(config.num_key_value_heads), None)


def _cost(config: "SDMConfig", kind: str, kv_heads: int, window: int | None) -> LayerCost:
    width, kv_size = config.hidden_size, kv_heads * derived(config.head_dim)
    return LayerCost(
        kind,
        weights=3 * width * width + 2 * width * kv_size,
        vectors=0,
        cached_per_token=2 * kv_size,
        window=window,
        attention_flops_per_token=4 * width,
    )
