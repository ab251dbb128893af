"""Dry run of a model's blocks with fake tensors and a fake process group.

It runs the code of training: torch's FakeTensorMode gives tensors shapes and no memory, and its "fake" process group
answers collectives at once. What autograd saves and what ranks send is then known for any size in less than a second,
and no formula has to follow the layers. The memories run the host code of their GPU kernels, which allocates what it
would on a GPU and launches nothing; neither a GPU nor Triton is needed.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sdm.layers import SparseDeltaMemory
from sdm.models.modeling import SDMBlock
from sdm.ops.triton.launch import dry_run as kernels_dry_run
from sdm.parallel import count_traffic, shard_size, split_channels, split_time
from sdm.run.mesh import Mesh

if TYPE_CHECKING:
    from sdm.plan.estimate import Workload

# Longer rows are extrapolated from dry runs at two lengths: what a block saves and sends is linear in the length.
LONGEST = 2048
_RECURRENCE, _GPU_RECURRENCE = "sdm.sparse_delta_rule_backward", "sdm.sparse_delta_rule_triton_backward"
Sent = dict[str, dict[str, float]]  # bytes by dimension of the mesh and kind of collective


@dataclass(frozen=True)
class BlockCost:
    """What one block takes of a rank."""

    weights: int  # elements, of all ranks with the same channels
    initial_state: int  # elements of a learned initial state, likewise
    shard: int  # elements of a rank's shard of both, as it is sent
    saved: float  # bytes saved for backward, the input included
    peak: float  # most bytes during forward and backward, beyond weights and input
    in_recurrence: float  # the same while the memory's backward runs, without `tables` and `scratch`; 0: there is none
    tables: float  # bytes of tables [...,N,D] that the memory's backward allocates; 0 on a CPU
    scratch: float  # what else it allocates: kept rows, links between accesses, parts of gradients; 0 on a CPU
    forward: Sent
    backward: Sent


def dry_run(work: Workload) -> dict[str, BlockCost]:
    """Run one block of each layer type of the model on a rank in the middle of the mesh.

    Returns:
        The cost of a block, by layer type.
    """
    kinds = work.model.layer_types or []
    with _mesh(work.mesh) as mesh:
        return {kind: _any_length(work, kinds.index(kind), mesh) for kind in dict.fromkeys(kinds)}


def _any_length(work: Workload, layer: int, mesh: DeviceMesh | None) -> BlockCost:
    length = work.slice_length
    if length <= LONGEST:
        return _run(work, layer, length, mesh)
    short, long = (_run(work, layer, size, mesh) for size in (LONGEST // 2, LONGEST))
    steps = (length - LONGEST) / (LONGEST - LONGEST // 2)

    def extend(a: float, b: float) -> float:
        return b + steps * (b - a)

    def extend_all(a: Sent, b: Sent) -> Sent:
        return {dim: {kind: extend(a[dim][kind], count) for kind, count in kinds.items()} for dim, kinds in b.items()}

    return BlockCost(
        long.weights,
        long.initial_state,
        long.shard,
        extend(short.saved, long.saved),
        extend(short.peak, long.peak),
        extend(short.in_recurrence, long.in_recurrence),
        long.tables,  # of the whole length
        long.scratch,
        extend_all(short.forward, long.forward),
        extend_all(short.backward, long.backward),
    )


def _run(work: Workload, layer: int, length: int, mesh: DeviceMesh | None) -> BlockCost:
    precision = torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "bfloat16")
    with FakeTensorMode(), precision, nullcontext() if work.on_cpu else kernels_dry_run():
        block = SDMBlock(work.model, layer)
        if not work.on_cpu:
            for memory in _memories(block):
                memory.backend = "triton"
        if mesh is not None and work.mesh.channel > 1 and any(True for _ in _memories(block)):
            split_channels(block, mesh["channel"].get_group())
        if mesh is not None and work.mesh.context > 1:
            split_time(block, mesh["context"].get_group())
        initial = sum(x.numel() for name, x in block.named_parameters() if name.endswith("initial_state"))
        weights = sum(x.numel() for x in block.parameters()) - initial
        shard = sum(shard_size(x.shape, work.mesh.shards) for x in block.parameters())
        own, saved = {_place(x) for x in block.parameters()}, {}

        def save(x: Tensor) -> Tensor:
            if _place(x) not in own:
                saved[_place(x)] = x.untyped_storage().nbytes()
            return x

        x = torch.empty(work.rows, length, work.model.hidden_size, requires_grad=True)
        with MemoryTracker((x, *block.parameters(), *block.buffers())) as tracker:
            with saved_tensors_hooks(save, lambda x: x), count_traffic() as forward:
                y = block(x)
            with count_traffic() as backward:
                y.sum().backward()
        tables, scratch = (0.0, 0.0) if tracker.gpu_call is None else _gpu_backward(tracker.gpu_call, work, length)
    sent: list[Sent] = [
        {dim: {**traffic.kinds(mesh[dim].get_group())} if mesh is not None else {} for dim in ("context", "channel")}
        for traffic in (forward, backward)
    ]
    kept, peak, in_recurrence = sum(saved.values()), tracker.peak, tracker.in_recurrence
    return BlockCost(weights, initial, shard, kept, peak, in_recurrence, tables, scratch, sent[0], sent[1])


def _gpu_backward(arguments: Sequence[Any], work: Workload, length: int) -> tuple[float, float]:
    """Bytes that the GPU op of the memory's backward allocates for rows of the whole length: tables, and the rest.

    The host code of the kernels runs on fake tensors, where it allocates and launches nothing.
    """
    from sdm.ops.sparse_delta_rule.triton.ops import backward

    grad_y, grad_final, residual, *tokens = arguments
    time = residual.shape[1] * work.slice_length // length

    def whole(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.new_empty((x.shape[0], time, *x.shape[2:]))

    longer = (whole(grad_y), grad_final, whole(residual), *map(whole, tokens[:7]), *tokens[7:])
    num_slots, channels = tokens[8], residual.shape[-1]
    known = [x for x in longer if isinstance(x, Tensor)]
    with torch.no_grad(), MemoryTracker(known, lambda x: tuple(x.shape[-2:]) == (num_slots, channels)) as tracker:
        backward(*longer)
    return tracker.tables, tracker.peak - tracker.tables


def _memories(block: SDMBlock) -> Iterator[SparseDeltaMemory]:
    return (module for module in block.modules() if isinstance(module, SparseDeltaMemory))


def _place(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@contextlib.contextmanager
def _mesh(mesh: Mesh) -> Iterator[DeviceMesh | None]:
    """A fake process group of the mesh. A process that has a real one cannot have it as well."""
    if mesh.context * mesh.channel == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # The data dimension does not matter within a block; of the others, a rank in the middle has both neighbours.
    shape = (1, mesh.context, mesh.channel)
    middle = mesh.context // 2 * mesh.channel
    hook = sys.excepthook  # torch puts the rank before every line of a traceback
    dist.init_process_group("fake", store=FakeStore(), rank=middle, world_size=mesh.context * mesh.channel)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("data", "context", "channel"))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of live tensors, op by op. Fake tensors count with the bytes that real ones would have.

    Args:
        known: tensors that exist before; they and views of them are not counted.
        is_table: which of the others are tables of a memory.
    """

    def __init__(self, known: Iterable[Tensor], is_table: Callable[[Tensor], bool] = lambda x: False) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.tables = 0
        """The tables' part of the peak."""
        self.in_recurrence = 0
        """The peak during the memory's backward op: on a CPU with its results and without its tables, on a GPU without
        all that it allocates."""
        self.gpu_call: tuple[Any, ...] | None = None
        """Arguments of the memory's backward op on a GPU."""
        self._is_table = is_table
        self._sizes = {x.untyped_storage()._cdata: 0 for x in known}
        self._tables: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if str(func).startswith(_GPU_RECURRENCE):
            self.in_recurrence, self.gpu_call = max(self.in_recurrence, self.now), args
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self._add(x)
        if self.now > self.peak:
            self.peak, self.tables = self.now, sum(self._tables.values())
        if str(func).startswith(_RECURRENCE):
            self.in_recurrence = max(self.in_recurrence, self.now)
        return made

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        place = storage._cdata
        if place not in self._sizes:
            self._sizes[place] = storage.nbytes()
            self.now += self._sizes[place]
            if self._is_table(x):
                self._tables[place] = self._sizes[place]
            weakref.finalize(storage, self._drop, place)

    def _drop(self, place: int) -> None:
        self.now -= self._sizes.pop(place)
        self._tables.pop(place, None)
