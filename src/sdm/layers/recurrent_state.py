"""The state of Gated DeltaNet and Mamba2.

Shapes: S streams (batch rows or documents), H heads, K key channels, D value channels.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from sdm.layers.interface import LayerState


@dataclasses.dataclass
class RecurrentState(LayerState):
    """The state of a recurrent layer with a short convolution in front."""

    memory: Tensor  # [S,H,K,D], at least float32
    tail: Tensor  # [S, taps - 1, channels] the last inputs of the convolution; no places without one
