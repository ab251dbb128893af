"""Shards of parameters and the full tensors that they belong to, for FSDP, checkpoints and exports.

A learned table M0 is never gathered: a checkpoint describes it as a DTensor that is sharded along slots (FSDP) and
along channels. The other parameters whose channels are split are small, and are gathered.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sdm.parallel.channels import ChannelShard


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
