"""What a training step takes on accelerators that are not at hand: memory, traffic and an estimate of its time."""

from __future__ import annotations

from dataclasses import dataclass

from sdm.models import cost
from sdm.plan.hardware import ACCELERATORS, MATRIX_SHARE, MEMORY_SHARE, USABLE, Accelerator
from sdm.plan.memory import Memory, memory
from sdm.plan.rehearsal import Sent, rehearse
from sdm.plan.traffic import seconds_on_wire, traffic
from sdm.plan.workload import FLOAT, Workload

__all__ = ["ACCELERATORS", "Accelerator", "Memory", "Plan", "Workload", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """A training step on a mesh."""

    work: Workload
    device: Accelerator
    memory: Memory  # of one rank
    sent: Sent  # by one rank in one step
    matrix_seconds: float  # of matrix products
    memory_seconds: float  # of rows of the memories, to and from the device's memory
    wire_seconds: float

    @property
    def seconds(self) -> float:
        return self.matrix_seconds + self.memory_seconds + self.wire_seconds

    @property
    def fits(self) -> bool:
        return self.memory.total <= USABLE * self.device.memory


def make_plan(work: Workload, device: Accelerator) -> Plan:
    """Run the blocks without numbers, and add up.

    The time is a roofline: FLOPs of matrix products at half of the peak, rows of the memories (what decoding moves, in
    forward, and twice that in backward) at four fifths of the bandwidth, the wire at four fifths of its speed, one
    after the other.
    """
    blocks = rehearse(work)
    sent, model = traffic(work, blocks), cost(work.model)
    mesh = work.mesh
    tokens = work.pieces * work.tokens
    flops = model.training_flops_per_token(work.sequence_length)
    if work.checkpointing == "block":
        flops = flops * 4 // 3  # forward runs twice
    moved = sum(layer.state_moved for layer in model.layers) / mesh.channel
    passes = 4 if work.checkpointing == "block" else 3
    return Plan(
        work,
        device,
        memory(work, blocks),
        sent,
        tokens * flops / (MATRIX_SHARE * device.flops),
        tokens * moved * FLOAT * passes / (MEMORY_SHARE * device.bandwidth),
        seconds_on_wire(work, sent, device),
    )
