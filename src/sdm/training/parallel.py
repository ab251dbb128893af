"""How a trainer's work is divided among processes. No other file of the trainer depends on the number of ranks.

`Parallel` knows which rows of a batch this process computes and in which pieces, shards the weights, and reduces values
and gradients over the ranks. The trainer makes the same calls for any number of processes; with one they cost nothing.
Other communication is in `sdm.ranks`, the degrees of parallelism in `sdm.run.mesh`.

The mesh is a torch `DeviceMesh` with the dimensions "data", "context" and "channel", with FSDP2 over the first two,
whose ranks share weights and have different tokens. Ranks along "channel" have the same tokens.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from sdm import __version__
from sdm.data.batch import IGNORED, Batch, BatchSource, rows_of_rank
from sdm.errors import TrainingError
from sdm.models import SDMForCausalLM
from sdm.parallel import ChannelShard, TimeSlice, from_full_, shard_dim, split_channels, split_time, to_full
from sdm.ranks import ALONE, Ranks, join, world_size
from sdm.run.config import TrainConfig
from sdm.run.config_file import differences, to_json
from sdm.run.mesh import ONE, Mesh, resolve

# Settings that may differ between machines.
LOCAL_SETTINGS = {"config.compute.device", "config.compute.threads", "config.data.cache_dir"}


def start(config: TrainConfig) -> Parallel:
    """Check the mesh of a run, connect to its other processes, and return its `Parallel`."""
    mesh = resolve(config, world_size())
    device = _device(config.compute.device)
    return Parallel(mesh, join(device), device, config.compute.mesh.keep_weights)


class Parallel:
    """The ranks of a run, and this process among them."""

    def __init__(
        self,
        mesh: Mesh = ONE,
        ranks: Ranks = ALONE,
        device: torch.device | None = None,
        keep_weights: bool = False,
    ) -> None:
        self.mesh, self.ranks, self._keep_weights = mesh, ranks, keep_weights
        self.device = device or torch.device("cpu")
        self.device_mesh: DeviceMesh | None = None
        self.channel_shards: dict[str, ChannelShard] = {}  # parameters of which this rank has some channels
        if torch.distributed.is_initialized() and ranks.size > 1:
            shape = (mesh.data, mesh.context, mesh.channel)
            self.device_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("data", "context", "channel"))

    def pieces(self, batch_size: int, accumulation: int = 1) -> list[range]:
        """Return the rows of a batch that this rank computes, in pieces whose gradients are accumulated.

        Which rows is decided by `rows_of_rank`. All ranks have the same number of pieces. A piece is never larger than
        the batch divided by `accumulation`, so that fewer ranks compute more pieces and need no more memory. Pieces may
        be empty: see `draw`.
        """
        each = math.ceil(batch_size / self.mesh.data)
        number = math.ceil(each / math.ceil(batch_size / accumulation))
        data_rank = self.ranks.rank // (self.mesh.context * self.mesh.channel)
        rows, size = rows_of_rank(batch_size, data_rank, self.mesh.data), math.ceil(each / number)
        return [rows[place * size : (place + 1) * size] for place in range(number)]

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sum values over the tokens of all ranks. Ranks along "channel" have the same tokens and count once."""
        return tuple(value / self.mesh.channel for value in self.ranks.sum(*values))

    def sum_(self, x: Tensor) -> Tensor:
        """Sum a tensor over the ranks in place, as `sum` does."""
        if self.device_mesh is not None:
            torch.distributed.all_reduce(x)
            x /= self.mesh.channel
        return x

    def max_(self, x: Tensor) -> Tensor:
        """Take the maximum of each element over the ranks, in place."""
        if self.device_mesh is not None:
            torch.distributed.all_reduce(x, torch.distributed.ReduceOp.MAX)
        return x

    def shard(self, model: SDMForCausalLM) -> None:
        """Shard the weights of a model over the ranks with FSDP2, block by block.

        Embeddings and head are gathered for the whole of a pass. The weights are those of rank 0; on other ranks the
        model may be on the meta device.
        """
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["data"]
        if self.mesh.context > 1:
            mesh = self.device_mesh["data", "context"]._flatten("shards")
        whole = model.state_dict() if self.ranks.first else {}
        if self.mesh.channel > 1:
            self.channel_shards = split_channels(model, self.device_mesh["channel"].get_group())
        if self.mesh.context > 1:
            split_time(model, self.device_mesh["context"].get_group())
        for module in (*model.model.layers, model):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=False if self._keep_weights else None,  # None: all but the root
                shard_placement_fn=lambda x: Shard(shard_dim(x.shape, mesh.size())),
            )
            assert isinstance(module, FSDPModule)
            # The loss is divided by the targets of the whole batch: gradients are summed, not averaged.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        register_fsdp_forward_method(model, "nll")
        _materialize(model, whole, self.device, self.channel_shards)

    def reduce_gradients(self, model: nn.Module, last: bool) -> None:
        """Announce whether the next piece is the last one: gradients are reduced over the ranks only after it."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """Return the norm of the full gradient."""
        if self.device_mesh is None or not self.channel_shards:
            return _norm(model.parameters())
        # Ranks along "channel" have different parts of the split parameters, and the same of the others.
        named = [(name, x) for name, x in model.named_parameters() if x.grad is not None]
        squares = _norm(x for name, x in named if name in self.channel_shards).square()
        torch.distributed.all_reduce(squares, group=self.device_mesh["channel"].get_group())
        return (squares + _norm(x for name, x in named if name not in self.channel_shards).square()).sqrt()

    def clip_(self, parameters: Sequence[nn.Parameter], longest: float, norm: Tensor) -> None:
        """Scale gradients whose norm is `norm` down to the norm `longest`."""
        torch.nn.utils.clip_grads_with_norm_(parameters, longest, norm)

    def full(self, parameter: str, x: Tensor) -> Tensor:
        """Return the full tensor that a parameter, gradient or moment belongs to, or this rank's shard as a DTensor."""
        if parameter not in self.channel_shards or x.dim() == 0:
            return x
        assert self.device_mesh is not None
        return to_full(x, self.channel_shards[parameter], self.device_mesh)

    def from_full_(self, parameter: str, x: Tensor, full: Tensor) -> None:
        """Copy this rank's part of a full tensor into `x`; the inverse of `full`."""
        if parameter in self.channel_shards and x.dim() > 0:
            from_full_(x, full, self.channel_shards[parameter])

    def draw(self, source: BatchSource, step: int, rows: range) -> Batch:
        """Return these rows of a step's batch, or this rank's slice of their tokens.

        A rank without rows gets one row without targets, because collectives need every rank.
        """
        if rows:
            return self.slice(source.batch(step, rows))
        batch = source.batch(step, range(1))
        return self.slice(replace(batch, targets=torch.full_like(batch.targets, IGNORED)))

    def slice(self, batch: Batch) -> Batch:
        """Return this rank's slice of a batch along time."""
        if self.mesh.context == 1:
            return batch
        rank = self.ranks.rank // self.mesh.channel % self.mesh.context
        part = TimeSlice.of(batch.input_ids, batch.targets, batch.cu_seqlens, rank, self.mesh.context)
        return replace(batch, input_ids=part.input_ids, targets=part.targets, cu_seqlens=part.cu_seqlens)

    def rows_of_all(self, own: Tensor, batch_size: int) -> Tensor:
        """Return this rank's rows [rows, ...] as its shard of a DTensor [batch_size, ...]."""
        if self.device_mesh is None:
            return own
        shape = torch.Size([batch_size, *own.shape[1:]])
        stride = torch.empty(shape, device="meta").stride()
        own = own.contiguous()
        return DTensor.from_local(
            own, self.device_mesh["data"], [Shard(0)], run_check=False, shape=shape, stride=stride
        )

    def own_rows(self, shared: Tensor) -> Tensor:
        """Return this rank's rows; the inverse of `rows_of_all`."""
        return local(shared)


def process_identity(config: TrainConfig) -> dict[str, Any]:
    """Return what all processes of a run must have in common: versions and configuration."""
    return {"version": {"sdm": __version__, "torch": torch.__version__}, "config": to_json(config)}


def data_identity(*sources: BatchSource | None) -> dict[str, Any]:
    """Return the fingerprints of the data that a process reads."""
    return {"data": [None if source is None else source.fingerprint for source in sources]}


def check_rank_consistency(ranks: Ranks, own: dict[str, Any]) -> None:
    """Raise on all ranks if one differs from rank 0: its message names the machine and the fields."""
    first = ranks.gather_call(lambda: own)[0]

    def compare() -> None:
        different = [entry for entry in differences(first, own) if entry[0] not in LOCAL_SETTINGS]
        if not different:
            return
        what = "; ".join(f"{name} is {ours!r} here and {theirs!r} on rank 0" for name, theirs, ours in different[:5])
        raise TrainingError(f"the process on {platform.node()} is not of this run: {what}")

    ranks.gather_call(compare)


def local(x: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    norm = torch.nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _materialize(
    model: SDMForCausalLM, whole: dict[str, Any], device: torch.device, shards: dict[str, ChannelShard]
) -> None:
    """Allocate the shards of a model and fill them with the values of rank 0."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        model.to_empty(device=device)
        model.tie_weights()
    else:
        nn.Module.to(model, device)
    if shards:  # one after the other, so that no rank holds all of them
        for name, x in model.state_dict().items():
            shape = shards[name].full_shape(x.shape) if name in shards else x.shape
            value = whole[name].to(device) if whole else torch.empty(shape, dtype=x.dtype, device=device)
            torch.distributed.broadcast(value, 0)
            from_full_(x, value, shards.get(name))
        return
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def _device(name: str) -> torch.device:
    """The device of this process. Processes of one machine take one GPU each."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and world_size() > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        reason = str(error).splitlines()[0]
        raise TrainingError(f"compute.device = {name!r} cannot be used here: {reason}; try 'auto'") from error
    return device
