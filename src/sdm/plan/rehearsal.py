"""A block of the model, run without numbers on ranks that are not there.

The code is that of training: torch's FakeTensorMode gives tensors shapes and no memory, its "fake" process group
answers collectives at once. What autograd keeps and what the ranks say to each other is then known for any size in
less than a second, and no formula has to follow the layers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sdm.models.modeling import SDMBlock
from sdm.parallel import counted, share_size, split_channels, split_time
from sdm.plan.live import Live
from sdm.plan.workload import Workload
from sdm.run.mesh import Mesh

# Rows longer than this are rehearsed at two lengths: what a block keeps and sends is linear in the length beyond them.
LONGEST = 2048
Sent = dict[str, dict[str, float]]  # bytes by dimension of the mesh and kind of collective


@dataclass(frozen=True)
class Rehearsal:
    """What one block means to a rank."""

    weights: int  # elements that ranks with the same channels share
    initial_state: int  # elements of a learned initial state, likewise
    share: int  # elements of a rank's share of both, as it is sent
    saved: float  # bytes kept for backward, the input included
    busiest: float  # most bytes while forward and backward run, beyond weights and input
    in_recurrence: float  # the same while the memory's backward runs, without its tables; 0 if there is none
    forward: Sent
    backward: Sent


def rehearse(work: Workload) -> dict[str, Rehearsal]:
    """One block of each layer type of the model, on a rank in the middle of the mesh."""
    kinds = work.model.layer_types or []
    with _mesh(work.mesh) as mesh:
        return {kind: _any_length(work, kinds.index(kind), mesh) for kind in dict.fromkeys(kinds)}


def _any_length(work: Workload, layer: int, mesh: DeviceMesh | None) -> Rehearsal:
    length = work.slice_length
    if length <= LONGEST:
        return _run(work, layer, length, mesh)
    short, long = (_run(work, layer, size, mesh) for size in (LONGEST // 2, LONGEST))
    steps = (length - LONGEST) / (LONGEST - LONGEST // 2)

    def extend(a: float, b: float) -> float:
        return b + steps * (b - a)

    def extend_all(a: Sent, b: Sent) -> Sent:
        return {dim: {kind: extend(a[dim][kind], count) for kind, count in kinds.items()} for dim, kinds in b.items()}

    return Rehearsal(
        long.weights,
        long.initial_state,
        long.share,
        extend(short.saved, long.saved),
        extend(short.busiest, long.busiest),
        extend(short.in_recurrence, long.in_recurrence),
        extend_all(short.forward, long.forward),
        extend_all(short.backward, long.backward),
    )


def _run(work: Workload, layer: int, length: int, mesh: DeviceMesh | None) -> Rehearsal:
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "bfloat16"):
        block = SDMBlock(work.model, layer)
        if mesh is not None and work.mesh.channel > 1 and any(True for _ in _memories(block)):
            split_channels(block, mesh["channel"].get_group())
        if mesh is not None and work.mesh.context > 1:
            split_time(block, mesh["context"].get_group())
        tables = sum(x.numel() for name, x in block.named_parameters() if name.endswith("initial_state"))
        weights = sum(x.numel() for x in block.parameters()) - tables
        share = sum(share_size(x.shape, work.mesh.shards) for x in block.parameters())
        own, kept = {_place(x) for x in block.parameters()}, {}

        def keep(x: Tensor) -> Tensor:
            if _place(x) not in own:
                kept[_place(x)] = x.untyped_storage().nbytes()
            return x

        x = torch.empty(work.rows, length, work.model.hidden_size, requires_grad=True)
        with Live((x, *block.parameters(), *block.buffers())) as live:
            with saved_tensors_hooks(keep, lambda x: x), counted() as forward:
                y = block(x)
            with counted() as backward:
                y.sum().backward()
    sent: list[Sent] = [
        {dim: {**traffic.kinds(mesh[dim].get_group())} if mesh is not None else {} for dim in ("context", "channel")}
        for traffic in (forward, backward)
    ]
    return Rehearsal(weights, tables, share, sum(kept.values()), live.peak, live.in_recurrence, sent[0], sent[1])


def _memories(block: SDMBlock) -> Iterator[torch.nn.Module]:
    from sdm.layers import SparseDeltaMemory

    return (module for module in block.modules() if isinstance(module, SparseDeltaMemory))


def _place(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@contextlib.contextmanager
def _mesh(mesh: Mesh) -> Iterator[DeviceMesh | None]:
    """Ranks that are not there. A process that has real ones cannot have these as well."""
    if mesh.context * mesh.channel == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # The data dimension does not matter within a block; of the others, a rank in the middle has both neighbours.
    shape = (1, mesh.context, mesh.channel)
    middle = mesh.context // 2 * mesh.channel
    said_by = sys.excepthook  # torch puts the rank before every line of a traceback
    dist.init_process_group("fake", store=FakeStore(), rank=middle, world_size=mesh.context * mesh.channel)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("data", "context", "channel"))
    finally:
        dist.destroy_process_group()
        sys.excepthook = said_by
