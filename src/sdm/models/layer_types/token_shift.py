"""Each token and the one before it: a local layer for very small models."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from sdm.layers import TokenShift
from sdm.models.layer_types.base import LayerCost, LayerType

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig


@dataclass
class NoFields:
    """The hidden size says it all."""


class TokenShiftType(LayerType):
    """Token shift: a token sees itself and the token before."""

    name = "token_shift"
    scope = "local"
    fields = NoFields

    def build(self, config: "SDMConfig") -> nn.Module:
        """Build the layer."""
        return TokenShift(config.hidden_size)

    def reach(self, config: "SDMConfig") -> int:
        """Number of earlier tokens that a token sees through this layer."""
        return 1

    def cost(self, config: "SDMConfig") -> LayerCost:
        """Work out the cost of one layer."""
        width = config.hidden_size
        return LayerCost(self.name, weights=2 * width * width, vectors=0, convolution_state=width)
