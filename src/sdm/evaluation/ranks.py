"""Measuring on several processes: `torchrun --nproc-per-node 4 -m sdm eval ...`. Units are independent: a rank takes
every so-manieth, writes its own journal, and the first puts them together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world: int = 1

    def has(self, index: int) -> bool:
        return index % self.world == self.rank

    def wait(self) -> None:
        """For all ranks to get here."""
        if self.world > 1:
            import torch.distributed

            torch.distributed.barrier()


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun started, or one."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    import torch.distributed

    torch.distributed.init_process_group("gloo", timeout=timedelta(days=7))  # ranks wait for the slowest
    try:
        yield Ranks(torch.distributed.get_rank(), world)
    finally:
        torch.distributed.destroy_process_group()
