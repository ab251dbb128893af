"""What accelerators offer, by their vendors' data sheets, and the shares of it that an estimate counts on."""

from __future__ import annotations

from dataclasses import dataclass

# Of the peak; stated beside every estimate. Matrix products of real models reach about this, so do streams of rows.
MATRIX_SHARE, MEMORY_SHARE, WIRE_SHARE = 0.5, 0.8, 0.8
USABLE = 0.92  # of the memory: the rest goes to the context, the allocator and the collectives' buffers


@dataclass(frozen=True)
class Accelerator:
    """One device of a machine that has several."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes of its memory per second
    flops: float  # dense bfloat16 per second
    link: float  # bytes per second to a neighbour in the machine, each way
    network: float  # bytes per second to another machine, each way
    per_machine: int = 8

    def speed(self, span: int) -> float:
        """Bytes per second between ranks of a group that spans so many consecutive devices."""
        return WIRE_SHARE * (self.link if span <= self.per_machine else self.network)


ACCELERATORS = {
    "a100": Accelerator("A100 80GB SXM", 80e9, 2.04e12, 312e12, 300e9, 25e9),
    "h100": Accelerator("H100 SXM", 80e9, 3.35e12, 989e12, 450e9, 50e9),
    "h200": Accelerator("H200 SXM", 141e9, 4.8e12, 989e12, 450e9, 50e9),
    "mi300x": Accelerator("MI300X", 192e9, 5.3e12, 1307e12, 448e9, 50e9),
}
