"""A training step as a plan sees it: which model, how many tokens, how they are computed, on which mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sdm.models import SDMConfig
from sdm.run.mesh import Mesh

FLOAT = 4  # bytes of weights, gradients, moments, states and gates
INDEX = 4  # bytes of a slot on the wire


@dataclass(frozen=True)
class Workload:
    """One optimizer step on every rank of a mesh."""

    model: SDMConfig
    mesh: Mesh
    sequence_length: int
    batch_size: int
    """Rows of a step, of all ranks."""
    rows: int = 1
    """Rows that a rank computes at a time."""
    precision: str = "bfloat16"
    """Of matrix products and activations: "float32" or "bfloat16"."""
    checkpointing: str = "block"
    """"none" or "block": what backward computes again."""
    keep_weights: bool = False
    """Whether ranks keep the weights of a block from forward to backward (`compute.mesh.keep_weights`)."""
    saved_share: float = 0.07
    """Share of the written rows that backward cannot recover and keeps."""
    channels_at_once: int | None = None
    """Value channels whose tables are there at a time; None: all, as on GPUs. The core for CPUs has 64 per thread."""

    @property
    def pieces(self) -> int:
        """Pieces that a rank's rows are computed in; gradients are added up over them."""
        return math.ceil(math.ceil(self.batch_size / self.mesh.data) / self.rows)

    @property
    def slice_length(self) -> int:
        """Tokens of a row that a rank has."""
        return math.ceil(self.sequence_length / self.mesh.context)

    @property
    def tokens(self) -> int:
        """Tokens that a rank computes at a time."""
        return self.rows * self.slice_length

    @property
    def activation(self) -> int:
        """Bytes of an activation."""
        return FLOAT if self.precision == "float32" else 2
