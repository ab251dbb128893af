"""A Sparse Delta Memory whose channels, or whose sequences, are split over ranks.

Shapes: B batch, T time of the whole sequence, H heads, N slots, D value channels, P ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdm.layers import SparseDeltaMemory
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.parallel.collectives import Group, all_reduce, all_to_all, copy_to, gather_time


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
