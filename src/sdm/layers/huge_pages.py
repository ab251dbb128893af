"""Parameters on huge pages, which one processor reads nearly twice as fast as pages of 4 KB.

Processors foresee a stream of reads within a page, and look up the address of each page that it enters.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

PAGE = 2 << 20
_ALIGNMENT = 64


@torch.no_grad()
def move_to_huge_pages(model: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Move parameters of a model on a CPU into one block of huge pages, one behind the other.

    They keep their values and stay the same objects. Parameters that share memory with others of the model stay where
    they are, and so do all of them where the system has no huge pages or they would not fill one.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    owners = Counter(x.untyped_storage().data_ptr() for x in chain(model.parameters(), model.buffers()))
    parameters = [x for x in dict.fromkeys(parameters) if owners[x.untyped_storage().data_ptr()] == 1]
    room = [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in parameters]
    if advice is None or sum(room) < PAGE:
        return
    block = mmap.mmap(-1, sum(room) + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        block.madvise(advice)
    except OSError:  # a kernel without them
        return
    start = -torch.frombuffer(block, dtype=torch.uint8).data_ptr() % PAGE
    for x, size in zip(parameters, room, strict=True):
        # Each has a storage of its own, which keeps the block alive.
        moved = torch.frombuffer(block, dtype=x.dtype, count=x.numel(), offset=start).view(x.shape)
        x.data = moved.copy_(x)
        start += size
