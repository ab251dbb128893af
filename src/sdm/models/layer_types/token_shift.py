"""Each token and the one before it: a local layer for very small models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from sdm.layers import TokenShift
from sdm.models.layer_cost import LayerCost
from sdm.models.layer_types.base import LayerType


@dataclass(frozen=True)
class NoFields:
    """The hidden size says it all."""


class TokenShiftType(LayerType):
    name = "token_shift"
    scope = "local"
    fields = NoFields

    def build(self, config: Any) -> nn.Module:
        return TokenShift(config.hidden_size)

    def reach(self, config: Any) -> int:
        return 1

    def cost(self, config: Any) -> LayerCost:
        width = config.hidden_size
        return LayerCost(self.name, weights=2 * width * width, vectors=0, convolution_state=width)
