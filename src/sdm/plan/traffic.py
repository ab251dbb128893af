"""What a rank sends in a training step: bytes handed to collectives, and how long the wire takes for them."""

from __future__ import annotations

import torch

from sdm.parallel import share_size
from sdm.plan.hardware import Accelerator
from sdm.plan.rehearsal import Rehearsal, Sent
from sdm.plan.workload import FLOAT, Workload


def traffic(work: Workload, blocks: dict[str, Rehearsal]) -> Sent:
    """By dimension of the mesh and kind of collective, the bytes that go in on one rank, in one step."""
    sent: Sent = {"data": _of_shards(work, blocks), "context": {}, "channel": {}}
    # What is computed again in backward is also sent again.
    again = 2 if work.checkpointing == "block" else 1
    for kind in work.model.layer_types or []:
        for part, times in ((blocks[kind].forward, again), (blocks[kind].backward, 1)):
            for dim, kinds in part.items():
                for collective, count in kinds.items():
                    sent[dim][collective] = sent[dim].get(collective, 0) + times * work.pieces * count
    return {dim: kinds for dim, kinds in sent.items() if kinds}


def _of_shards(work: Workload, blocks: dict[str, Rehearsal]) -> dict[str, float]:
    """FSDP gathers each block for forward and, unless it is kept, again for backward, the root once, piece by piece;
    gradients are exchanged after the last piece."""
    shards = work.mesh.shards
    if shards == 1:
        return {}
    model = work.model
    embedding = share_size(torch.Size((model.vocab_size, model.hidden_size)), shards)
    norm = share_size(torch.Size((model.hidden_size,)), shards)
    root = embedding * (1 if model.tie_word_embeddings else 2) + norm
    inner = sum(blocks[kind].share for kind in model.layer_types or [])
    return {
        "all_gather": FLOAT * work.pieces * ((1 if work.keep_weights else 2) * inner + root),
        "reduce_scatter": FLOAT * shards * (inner + root),
    }


def seconds_on_wire(work: Workload, sent: Sent, device: Accelerator) -> float:
    """A ring moves (P - 1) / P of a tensor for each half of an all-reduce; nothing is assumed to overlap."""
    mesh, total = work.mesh, 0.0
    spans = {"channel": mesh.channel, "context": mesh.context * mesh.channel, "data": mesh.size}
    ranks = {"channel": mesh.channel, "context": mesh.context, "data": mesh.shards}
    for dim, kinds in sent.items():
        count, speed = ranks[dim], device.speed(spans[dim])
        share = (count - 1) / count
        factors = {"all_reduce": 2 * share, "all_gather": count - 1, "neighbour": 1}
        total += sum(factors.get(kind, share) * size for kind, size in kinds.items()) / speed
    return total
