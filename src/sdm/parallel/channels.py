"""Memories split by channels. Every value channel runs its own recurrence, which therefore needs no communication.

A rank keeps D / P channels of each memory: of the table, of M0, of the projections to the values and the gate (rows),
of the output projection (columns) and of the norm. Keys and decay gates, which address all channels, are replicated.
Three all-reduces remain: of the squares that the norm needs, of the layer's output, and in backward of the gradients of
the addresses and the input.

For checkpoints and exports, a learned table M0 is never gathered: it is described as a DTensor that is sharded along
slots (FSDP) and along channels. The other parameters whose channels are split are small, and are gathered.

Shapes: B batch, T time, H heads, N slots, D value channels, P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sdm.layers import SparseDeltaMemory
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.parallel.collectives import Group, all_reduce, all_to_all, copy_to, gather_time, reduce_from


class SplitMemory(SparseDeltaMemory):
    """A memory after `split_channels` or `split_time`. Parameters keep their names; `head_dim` and the tables are those
    of this rank's channels."""

    channel_group: Group | None = None
    context_group: Group | None = None

    @staticmethod
    def of(layer: SparseDeltaMemory) -> SplitMemory:
        """Convert a layer in place: its parameters must stay the same objects, which FSDP and others hold."""
        layer.__class__ = SplitMemory
        assert isinstance(layer, SplitMemory)
        return layer

    def _for_channels(self, x: Tensor) -> Tensor:
        return x if self.channel_group is None else copy_to(self.channel_group, x)[0]

    def _recur(self, tokens: Tokens, initial_state: Tensor | None, **options: Any) -> tuple[Tensor, Tensor | None]:
        if self.channel_group is not None:
            shared = copy_to(self.channel_group, tokens.write_weight, tokens.beta, tokens.log_decay, tokens.read_weight)
            write_weight, beta, log_decay, read_weight = shared
            tokens = tokens._replace(write_weight=write_weight, beta=beta, log_decay=log_decay, read_weight=read_weight)
        if self.context_group is None:
            return super()._recur(tokens, initial_state, **options)
        return self._recur_over_time(tokens, initial_state, self.context_group, options)

    def _recur_over_time(
        self, tokens: Tokens, initial_state: Tensor | None, group: Group, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Turn slices of time into slices of channels, run over the whole sequence, and turn back."""
        if options.get("output_final_state"):
            raise ValueError("return_state: sequences split over ranks carry no states on; set context to 1")
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        # Slots fit into 32 bits: half as much to send.
        small = tokens._replace(
            write_index=tokens.write_index.to(torch.int32), read_index=tokens.read_index.to(torch.int32)
        )
        write_index, write_weight, beta, log_decay, read_index, read_weight = gather_time(
            group,
            *(small.write_index, small.write_weight, small.beta, small.log_decay, small.read_index, small.read_weight),
        )
        value = all_to_all(tokens.value, group, split=3, join=1)
        if initial_state is not None:
            initial_state = initial_state.chunk(ranks, dim=-1)[rank]
        whole = Tokens(write_index, write_weight, value, beta, log_decay, read_index, read_weight)
        readings, _ = super()._recur(whole, initial_state, **options)
        return all_to_all(readings, group, split=1, join=3), None


class SlicedRMSNorm(nn.RMSNorm):
    """RMS norm of vectors of which each rank holds some channels."""

    def __init__(self, norm: nn.RMSNorm, channels: int, group: Group) -> None:
        super().__init__(norm.weight.shape, eps=norm.eps)
        self.weight = norm.weight
        self.channels, self.group = channels, group  # channels of the whole vector

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the mean square over the channels of all ranks."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = all_reduce(wide.square().sum(-1, keepdim=True), self.group)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return (wide * torch.rsqrt(squares / self.channels + eps)).to(x.dtype) * self.weight


@dataclass(frozen=True)
class ChannelShard:
    """Where a rank's channels lie in a full parameter: along `dim` the parameter has `heads` runs of equal length, and
    a rank holds the same stretch of every run."""

    dim: int
    heads: int
    rank: int
    ranks: int

    def take(self, full: Tensor) -> Tensor:
        """Copy this rank's part of a full tensor."""
        runs = full.unflatten(self.dim, (self.heads, self.ranks, -1))
        part = runs.select(self.dim + 1, self.rank)
        return part.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the parts of all ranks, in their order, to the full tensor."""
        runs = torch.cat([part.unflatten(self.dim, (self.heads, -1)) for part in parts], dim=self.dim + 1)
        return runs.flatten(self.dim, self.dim + 1)

    def full_shape(self, part: torch.Size) -> torch.Size:
        """Return the shape of the full tensor, given that of a part."""
        return torch.Size(size * self.ranks if dim == self.dim else size for dim, size in enumerate(part))


def check_channels(model: nn.Module, ranks: int) -> None:
    """Raise a ValueError unless the memories of the model can be split over so many ranks."""
    memories = [layer for layer in model.modules() if isinstance(layer, SparseDeltaMemory)]
    if not memories:
        raise ValueError("channel: the model has no sparse delta memory to split; leave it at 1")
    for layer in memories:
        if layer.head_dim % ranks:
            nearest = [count for count in range(1, layer.head_dim + 1) if layer.head_dim % count == 0]
            nearest = sorted(sorted(nearest, key=lambda count: abs(count - ranks))[:3])
            raise ValueError(
                f"channel = {ranks} must divide the {layer.head_dim} value channels of a memory's head; "
                f"the nearest that do are {', '.join(map(str, nearest))}"
            )


def split_channels(model: nn.Module, group: Group) -> dict[str, ChannelShard]:
    """Reduce every memory of a model to this rank's channels, in place.

    The model must be the same on all ranks. Create its optimizer afterwards.

    Returns:
        The shards of the parameters that were split, by name.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    check_channels(model, ranks)
    shards: dict[str, ChannelShard] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SparseDeltaMemory):
            parts = _split(layer, group, rank, ranks)
            shards |= {f"{name}.{part}" if name else part: shard for part, shard in parts.items()}
    return shards


def _split(layer: SparseDeltaMemory, group: Group, rank: int, ranks: int) -> dict[str, ChannelShard]:
    heads = layer.num_heads
    shards = {
        "value_proj.weight": ChannelShard(0, heads, rank, ranks),
        "gate_proj.weight": ChannelShard(0, heads, rank, ranks),
        "out_proj.weight": ChannelShard(1, heads, rank, ranks),
        "output_norm.weight": ChannelShard(0, 1, rank, ranks),
        "initial_state": ChannelShard(2, 1, rank, ranks),
    }
    if layer.initial_state is None:
        del shards["initial_state"]
    for name, shard in shards.items():
        module, _, parameter = name.rpartition(".")
        owner = layer.get_submodule(module)
        full = getattr(owner, parameter)
        setattr(owner, parameter, nn.Parameter(shard.take(full.detach()), requires_grad=full.requires_grad))
    for linear in (layer.value_proj, layer.gate_proj):
        linear.out_features //= ranks
    layer.out_proj.in_features //= ranks
    layer.out_proj.register_forward_hook(lambda module, inputs, y: reduce_from(y, group))
    layer.output_norm = SlicedRMSNorm(layer.output_norm, layer.head_dim, group)
    layer.head_dim //= ranks
    SplitMemory.of(layer).channel_group = group
    return shards


def shard_dim(shape: torch.Size, ranks: int) -> int:
    """Return the dimension along which FSDP shards a parameter over so many ranks.

    It is the first one, unless that is shorter than the number of ranks: the initial state of a memory with one head is
    sharded along its slots.
    """
    longest = max(range(len(shape)), key=lambda dim: shape[dim])
    return longest if shape[0] < ranks and shape[longest] % ranks == 0 else 0


def shard_size(shape: torch.Size, ranks: int) -> int:
    """Return the elements of a rank's shard as it is sent: all shards are padded to the same size."""
    dim = shard_dim(shape, ranks)
    return math.ceil(shape[dim] / ranks) * shape.numel() // max(shape[dim], 1)


def to_full(x: Tensor, shard: ChannelShard, mesh: DeviceMesh) -> Tensor:
    """Return the full tensor that a rank's channels belong to, gathered or as a DTensor. All ranks call it.

    Args:
        x: this rank's channels, which FSDP may have sharded over the ranks with the same channels.
        shard: where the channels lie in the full tensor.
        mesh: of dimensions "data", "context" and "channel".
    """
    if isinstance(x, DTensor) and _orthogonal(x, shard):
        (placement,) = x.placements
        shape = shard.full_shape(x.shape)
        stride = torch.empty(shape, device="meta").stride()
        placements = [placement, placement, Shard(shard.dim)]
        return DTensor.from_local(x.to_local(), mesh, placements, run_check=False, shape=shape, stride=stride)
    own = x.full_tensor() if isinstance(x, DTensor) else x
    parts = [torch.empty_like(own) for _ in range(shard.ranks)]
    dist.all_gather(parts, own.contiguous(), group=mesh["channel"].get_group())
    return shard.join(parts)


def _orthogonal(x: DTensor, shard: ChannelShard) -> bool:
    """Whether FSDP and the channels divide different dimensions, and evenly."""
    (placement,) = x.placements
    if not isinstance(placement, Shard) or shard.heads > 1:
        return False
    return placement.dim != shard.dim and x.shape[placement.dim] % x.device_mesh.size() == 0


@torch.no_grad()
def from_full_(x: Tensor, full: Tensor, shard: ChannelShard | None) -> None:
    """Copy a rank's part of a full tensor into `x`, in place. A DTensor shares its memory with `x` already."""
    if isinstance(full, DTensor):
        return
    part = full if shard is None else shard.take(full)
    if isinstance(x, DTensor):
        part = distribute_tensor(part, x.device_mesh, x.placements, src_data_rank=None).to_local()
        x = x.to_local()
    x.copy_(part)
