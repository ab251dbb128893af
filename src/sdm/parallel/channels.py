"""Memories split by channels. Every value channel runs its own recurrence, which therefore needs no communication.

A rank keeps D / P channels of each memory: of the table, of M0, of the projections to the values and the gate (rows),
of the output projection (columns) and of the norm. Keys and decay gates, which address all channels, are replicated.
Three all-reduces remain: of the squares that the norm needs, of the layer's output, and in backward of the gradients of
the addresses and the input.

Shapes: B batch, T time, H heads, N slots, D value channels, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdm.layers import SparseDeltaMemory
from sdm.parallel.collectives import Group, reduce_from
from sdm.parallel.memory import SlicedRMSNorm, SplitMemory


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
