"""The processes of one job, and the few words that they exchange: who does a thing once, and what all agree on.

torchrun starts the processes and tells each in its environment which one it is. A process by itself is rank 0 of 1:
every call here then returns at once what it was given, and torch.distributed is not touched.

Calls are made by all ranks, in the same order. What a rank has refused ends them all: the rank itself raises its error,
the others a `RankError` that names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sdm.errors import RankError

T = TypeVar("T")

# How long ranks wait for one that does something for all of them, such as tokenising a corpus. One that has died is
# noticed by its closed connection, or by torchrun, and not by this.
PATIENCE = timedelta(days=1)


class Ranks:
    """This process among those of its job."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @property
    def _leads(self) -> bool:
        return self.size == 1 or os.environ.get("LOCAL_RANK", "0") == "0"

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and shows what there is once."""
        return self.rank == 0

    def gather_call(self, action: Callable[[], T]) -> list[T]:
        """Every rank acts. All get what came of it, by rank."""
        if self.size == 1:
            return [action()]
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, (result, None if failure is None else str(failure)), group=self._group)
        if failure is not None:
            raise failure
        for rank, (_, reason) in enumerate(said):
            if reason is not None:
                raise RankError(f"rank {rank}: {reason}")
        return [result for result, _ in said]

    def on_rank0(self, action: Callable[[], T]) -> T:
        """The first rank acts. All get what came of it."""
        return self.gather_call(lambda: action() if self.first else None)[0]  # type: ignore[return-value]

    def local_rank0_first(self, action: Callable[[], T]) -> T:
        """Every rank acts, one of each machine before the others: those find what it has left on the disk."""
        results: list[T] = []
        for turn in (True, False):
            self.gather_call(lambda turn=turn: results.append(action()) if self._leads == turn else None)  # type: ignore[misc]
            if self.size == 1:
                break
        return results[0]

    def sum(self, *values: float) -> tuple[float, ...]:
        """Each value, added up over the ranks."""
        if self.size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return tuple(total.tolist())

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.sum(float(flag))[0] > 0


ALONE = Ranks()


def world_size() -> int:
    """How many processes the job has, by what torchrun put into the environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(device: torch.device) -> Ranks:
    """Meet the other processes of the job. Their messages go over gloo; tensors on GPUs over nccl."""
    if world_size() == 1:
        return ALONE
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store, rank, size = next(iter(dist.rendezvous("env://")))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.PrefixStore(_attempt(), store), rank=rank, world_size=size)
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=PATIENCE))


def _attempt() -> str:
    """torchrun keeps one store over all its restarts, with the addresses of processes that are dead. With
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 it makes a new one each time."""
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return "sdm"
    return f"sdm-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{world_size()}"


def leave() -> None:
    """Part from the others, at the end of a job."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process is gone, or does not answer. Gloo has no class for that."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)
