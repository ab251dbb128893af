"""A memory split by channels: every value channel runs its own recurrence, so that ranks need not talk within it.

Of each memory a rank keeps D / P channels: of the table, of M0, of the projections to the values and the gate (rows),
of the projection back (columns) and of the norm. Keys and decay gates, which address all channels, are everybody's.
Three sums over the ranks remain: of the squares that the norm needs, of the layer's output, and in backward of what all
ranks say about the addresses and the input.

Shapes: B batch, T time, H heads, N slots, D value channels, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdm.layers import SparseDeltaMemory
from sdm.parallel.collectives import Group, add_up
from sdm.parallel.memory import SlicedRMSNorm, SplitMemory


@dataclass(frozen=True)
class Cut:
    """How a rank's part of a parameter lies in the whole: along `dim` the whole has `heads` runs of as many channels
    each, and a rank has the same stretch of every run."""

    dim: int
    heads: int
    rank: int
    ranks: int

    def take(self, whole: Tensor) -> Tensor:
        """A rank's part, as a copy."""
        runs = whole.unflatten(self.dim, (self.heads, self.ranks, -1))
        part = runs.select(self.dim + 1, self.rank)
        return part.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, from the parts of all ranks in their order."""
        runs = torch.cat([part.unflatten(self.dim, (self.heads, -1)) for part in parts], dim=self.dim + 1)
        return runs.flatten(self.dim, self.dim + 1)

    def whole_shape(self, part: torch.Size) -> torch.Size:
        return torch.Size(size * self.ranks if dim == self.dim else size for dim, size in enumerate(part))


def check_channels(model: nn.Module, ranks: int) -> None:
    """Raise unless the memories of the model can be split over so many ranks."""
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


def split_channels(model: nn.Module, group: Group) -> dict[str, Cut]:
    """Leave each rank of the group its channels of every memory, in place.

    The model must be the same on all ranks. Its optimizer is to be made afterwards. Returns how the parameters were
    cut, by name.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    check_channels(model, ranks)
    cuts: dict[str, Cut] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SparseDeltaMemory):
            parts = _split(layer, group, rank, ranks)
            cuts |= {f"{name}.{part}" if name else part: cut for part, cut in parts.items()}
    return cuts


def _split(layer: SparseDeltaMemory, group: Group, rank: int, ranks: int) -> dict[str, Cut]:
    heads = layer.num_heads
    cuts = {
        "value_proj.weight": Cut(0, heads, rank, ranks),
        "gate_proj.weight": Cut(0, heads, rank, ranks),
        "out_proj.weight": Cut(1, heads, rank, ranks),
        "output_norm.weight": Cut(0, 1, rank, ranks),
        "initial_state": Cut(2, 1, rank, ranks),
    }
    if layer.initial_state is None:
        del cuts["initial_state"]
    for name, cut in cuts.items():
        module, _, parameter = name.rpartition(".")
        owner = layer.get_submodule(module)
        whole = getattr(owner, parameter)
        setattr(owner, parameter, nn.Parameter(cut.take(whole.detach()), requires_grad=whole.requires_grad))
    for linear in (layer.value_proj, layer.gate_proj):
        linear.out_features //= ranks
    layer.out_proj.in_features //= ranks
    layer.out_proj.register_forward_hook(lambda module, inputs, y: add_up(y, group))
    layer.output_norm = SlicedRMSNorm(layer.output_norm, layer.head_dim, group)
    layer.head_dim //= ranks
    SplitMemory.of(layer).channel_group = group
    return cuts
