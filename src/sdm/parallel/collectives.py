"""Differentiable collectives, and a count of the bytes that they send.

All ranks of the group call each function, in the same order. The loss is the sum of the ranks' own losses.

Shapes: B batch, T time of the whole sequence, P ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdm.ops.registration import Context

Group = dist.ProcessGroup


@dataclass
class Traffic:
    """Bytes of the tensors that one rank passes to collectives, by the group's name and the kind of collective."""

    sent: dict[tuple[str, str], int] = field(default_factory=dict)

    def kinds(self, group: Group) -> dict[str, int]:
        """Return the bytes within a group, by kind of collective."""
        return {kind: count for (name, kind), count in self.sent.items() if name == group.group_name}


_counters: list[Traffic] = []


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this process sends through the functions of this file, in forward and in backward."""
    traffic = Traffic()
    _counters.append(traffic)
    try:
        yield traffic
    finally:
        _counters.remove(traffic)


def _count(kind: str, x: Tensor, group: Group) -> None:
    for traffic in _counters:
        key = group.group_name, kind
        traffic.sent[key] = traffic.sent.get(key, 0) + x.nbytes


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    _count("all_reduce", x, group)
    dist.all_reduce(x, group=group)
    return x


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(True)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Any, ...]:
        # One message for all of them, in the widest of their types.
        flat = torch.cat([grad.flatten() for grad in grads])
        pieces = _all_reduce(flat, ctx.group).split([grad.numel() for grad in grads])
        return None, *(piece.view_as(grad).to(grad.dtype) for piece, grad in zip(pieces, grads, strict=True))


def copy_to(group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors that are equal on all ranks; their gradients are summed over the ranks.

    Use it where ranks continue with different parts of the computation."""
    return _CopyTo.apply(group, *tensors)


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks; the gradient passes unchanged. Use it where all ranks continue with the same computation."""
    return _ReduceFrom.apply(x, group)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks, and sum the gradients. Use it where ranks continue with different parts."""
    return _AllReduce.apply(x, group)


def _all_to_all(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    size = dist.get_world_size(group)
    # The part for each rank first; then the part from each rank first.
    parts = torch.stack(x.chunk(size, dim=split)).contiguous()
    _count("all_to_all", parts, group)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), dim=join)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _all_to_all(x, group, split, join)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return _all_to_all(grad, ctx.group, ctx.join, ctx.split), None, None, None


def all_to_all(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    """Turn slices along `join` into slices along `split`: rank r sends its p-th part along `split` to rank p, and
    concatenates what it receives along `join`. All ranks have the same shape."""
    return _AllToAll.apply(x, group, split, join)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(_gather(x, group) for x in tensors)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Any, ...]:
        return None, *(_scatter_sum(grad, ctx.group) for grad in grads)


def _gather(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    _count("all_gather", x, group)
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim=1)


def _scatter_sum(grad: Tensor, group: Group) -> Tensor:
    # The parts are added in the order of the ranks, so that the sum is the same from run to run.
    size = dist.get_world_size(group)
    parts = torch.stack(grad.chunk(size, dim=1)).contiguous()
    _count("all_to_all", parts, group)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.sum(0)


def gather_time(group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Gather [B,T/P,...] of each rank to [B,T,...] on all; gradients are summed. Integers have no gradients."""
    floats = [x for x in tensors if x.is_floating_point()]
    gathered = iter(_Gather.apply(group, *floats))
    return tuple(next(gathered) if x.is_floating_point() else _gather(x, group) for x in tensors)


def _pass_on(x: Tensor, group: Group, step: int) -> Tensor:
    """Send x to the rank `step` further and receive from the rank as far before; zeros where there is none."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sizes_out, sizes_in = [0] * size, [0] * size
    count = x.numel()
    if 0 <= rank + step < size:
        sizes_out[rank + step] = count
    if 0 <= rank - step < size:
        sizes_in[rank - step] = count
    sent = x.contiguous().flatten()[: sum(sizes_out)]
    _count("neighbour", sent, group)
    received = x.new_empty(sum(sizes_in))
    dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=group)
    return received.view_as(x) if received.numel() else torch.zeros_like(x)


class _PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _pass_on(x, group, 1)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return _pass_on(grad, ctx.group, -1), None


def tokens_before(x: Tensor, group: Group, count: int) -> Tensor:
    """Return the last `count` tokens before this rank's slice x [B,T/P,...] of time, or as many as there are."""
    own = x.shape[1]
    piece, received = x[:, max(0, own - count) :], 0
    parts: list[Tensor] = []
    while received < count and own:
        piece = _PassOn.apply(piece, group)
        parts.insert(0, piece)
        received += piece.shape[1]
    before = min(count, dist.get_rank(group) * own)
    return torch.cat(parts, dim=1)[:, received - before :] if parts else x[:, :0]
