"""The estimate of a training step on accelerators that are not at hand: memory, traffic and time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sdm.models import cost
from sdm.parallel import shard_size
from sdm.plan.dry_run import BlockCost, Sent, dry_run
from sdm.plan.memory import Memory, memory
from sdm.plan.workload import FLOAT, MATRIX_SHARE, MEMORY_SHARE, USABLE, Accelerator, Workload


@dataclass(frozen=True)
class Plan:
    """What a training step takes on a mesh."""

    work: Workload
    device: Accelerator
    memory: Memory  # of one rank
    sent: Sent  # by one rank in one step
    matrix_seconds: float  # of matrix products
    memory_seconds: float  # of rows of the memories, to and from the device's memory
    wire_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of a step, without overlap."""
        return self.matrix_seconds + self.memory_seconds + self.wire_seconds

    @property
    def fits(self) -> bool:
        """Whether a rank's memory fits into the device."""
        return self.memory.total <= USABLE * self.device.memory


def make_plan(work: Workload, device: Accelerator) -> Plan:
    """Estimate a training step from a dry run of the blocks.

    The time is a roofline: FLOPs of matrix products at half of the peak, rows of the memories (what decoding moves, in
    forward, and twice that in backward) at four fifths of the bandwidth, the wire at four fifths of its speed, one
    after the other.

    Args:
        work: the step.
        device: what every rank runs on.
    """
    blocks = dry_run(work)
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


def traffic(work: Workload, blocks: dict[str, BlockCost]) -> Sent:
    """Return the bytes that one rank passes to collectives in a step, by dimension of the mesh and kind."""
    sent: Sent = {"data": _of_shards(work, blocks), "context": {}, "channel": {}}
    # Recomputation in backward sends again.
    again = 2 if work.checkpointing == "block" else 1
    for kind in work.model.layer_types or []:
        for part, times in ((blocks[kind].forward, again), (blocks[kind].backward, 1)):
            for dim, kinds in part.items():
                for collective, count in kinds.items():
                    sent[dim][collective] = sent[dim].get(collective, 0) + times * work.pieces * count
    return {dim: kinds for dim, kinds in sent.items() if kinds}


def _of_shards(work: Workload, blocks: dict[str, BlockCost]) -> dict[str, float]:
    """FSDP gathers each block for forward and, unless it is kept, again for backward, the root once, piece by piece;
    gradients are reduced after the last piece."""
    shards = work.mesh.shards
    if shards == 1:
        return {}
    model = work.model
    embedding = shard_size(torch.Size((model.vocab_size, model.hidden_size)), shards)
    norm = shard_size(torch.Size((model.hidden_size,)), shards)
    root = embedding * (1 if model.tie_word_embeddings else 2) + norm
    inner = sum(blocks[kind].shard for kind in model.layer_types or [])
    return {
        "all_gather": FLOAT * work.pieces * ((1 if work.keep_weights else 2) * inner + root),
        "reduce_scatter": FLOAT * shards * (inner + root),
    }


def seconds_on_wire(work: Workload, sent: Sent, device: Accelerator) -> float:
    """Return the seconds of all collectives of a step, one after the other.

    A ring moves (P - 1) / P of a tensor for each half of an all-reduce.
    """
    mesh, total = work.mesh, 0.0
    spans = {"channel": mesh.channel, "context": mesh.context * mesh.channel, "data": mesh.size}
    ranks = {"channel": mesh.channel, "context": mesh.context, "data": mesh.shards}
    for dim, kinds in sent.items():
        count, speed = ranks[dim], device.speed(spans[dim])
        share = (count - 1) / count
        factors = {"all_reduce": 2 * share, "all_gather": count - 1, "neighbour": 1}
        total += sum(factors.get(kind, share) * size for kind, size in kinds.items()) / speed
    return total
