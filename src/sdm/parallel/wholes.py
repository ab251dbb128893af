"""What a rank has of a parameter whose channels are split, as its share of the whole one: for checkpoints and exports.

A learned table stays where it is: its share is a tensor that is dealt along slots to the ranks that share weights, and
along channels. The other parameters are small beside it, and are gathered.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sdm.parallel.channels import Cut


def share_of_whole(x: Tensor, cut: Cut, mesh: DeviceMesh) -> Tensor:
    """`x` as a share of the whole tensor, or the whole tensor itself. All ranks call it.

    Args:
        x: this rank's channels, which FSDP may have dealt to the ranks with the same ones.
        mesh: of dimensions "data", "context" and "channel".
    """
    group = mesh["channel"].get_group()
    if isinstance(x, DTensor) and _apart(x, cut):
        (dealt,) = x.placements
        whole = cut.whole_shape(x.shape)
        stride = torch.empty(whole, device="meta").stride()
        placements = [dealt, dealt, Shard(cut.dim)]
        return DTensor.from_local(x.to_local(), mesh, placements, run_check=False, shape=whole, stride=stride)
    own = x.full_tensor() if isinstance(x, DTensor) else x
    parts = [torch.empty_like(own) for _ in range(cut.ranks)]
    dist.all_gather(parts, own.contiguous(), group=group)
    return cut.join(parts)


def _apart(x: DTensor, cut: Cut) -> bool:
    """Whether channels and shares of weights are cut along different dimensions, and evenly."""
    (dealt,) = x.placements
    if not isinstance(dealt, Shard) or cut.heads > 1:
        return False
    return dealt.dim != cut.dim and x.shape[dealt.dim] % x.device_mesh.size() == 0


@torch.no_grad()
def take_share_(x: Tensor, whole: Tensor, cut: Cut | None) -> None:
    """Fill what a rank has of a parameter from the whole one. A share is filled already."""
    if isinstance(whole, DTensor):
        return
    part = whole if cut is None else cut.take(whole)
    if isinstance(x, DTensor):
        part = distribute_tensor(part, x.device_mesh, x.placements, src_data_rank=None).to_local()
        x = x.to_local()
    x.copy_(part)
