"""The input of a plan: a training step (model, tokens, mesh) and the accelerator that it runs on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sdm.models import SDMConfig
from sdm.run.mesh import Mesh

FLOAT = 4  # bytes of weights, gradients, moments, states and gates


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
    """Type of matrix products and activations: "float32" or "bfloat16"."""
    checkpointing: str = "block"
    """What backward recomputes: "none" or "block"."""
    keep_weights: bool = False
    """Whether ranks keep the weights of a block from forward to backward (`compute.mesh.keep_weights`)."""
    saved_share: float = 0.07
    """Share of the written rows that backward cannot recover, and forward saves."""
    channels_at_once: int | None = None
    """Value channels whose tables exist at a time; None: all, as on GPUs. The CPU core has 64 per thread."""

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


# Shares of the vendors' peaks that an estimate assumes. Matrix products of real models reach about this, so do streams
# of rows. They are printed beside every estimate.
MATRIX_SHARE, MEMORY_SHARE, WIRE_SHARE = 0.5, 0.8, 0.8
USABLE = 0.92  # of the memory: the rest goes to the context, the allocator and the collectives' buffers


@dataclass(frozen=True)
class Accelerator:
    """One device, by its vendor's data sheet."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes of its memory per second
    flops: float  # dense bfloat16 per second
    link: float  # bytes per second to a neighbour in the machine, each way
    network: float  # bytes per second to another machine, each way
    per_machine: int = 8

    def speed(self, span: int) -> float:
        """Return the bytes per second between ranks of a group that spans so many consecutive devices."""
        return WIRE_SHARE * (self.link if span <= self.per_machine else self.network)


ACCELERATORS = {
    "a100": Accelerator("A100 80GB SXM", 80e9, 2.04e12, 312e12, 300e9, 25e9),
    "h100": Accelerator("H100 SXM", 80e9, 3.35e12, 989e12, 450e9, 50e9),
    "h200": Accelerator("H200 SXM", 141e9, 4.8e12, 989e12, 450e9, 50e9),
    "mi300x": Accelerator("MI300X", 192e9, 5.3e12, 1307e12, 448e9, 50e9),
}
