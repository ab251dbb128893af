"""The processes of one job: what one rank does for all, and what all agree on.

torchrun starts the processes and tells each its rank in its environment. A single process is rank 0 of 1: every call
then returns at once what it was given, and torch.distributed is not used.

All ranks make the same calls in the same order. If an action fails on one rank, that rank raises its error and the
others a `RankError` that names it.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from sdm.errors import RankError

T = TypeVar("T")
logger = logging.getLogger(__name__)

# How long ranks wait for one that does something for all of them, such as tokenising a corpus. A dead rank is noticed
# by its closed connection, or by torchrun, and not by this.
TIMEOUT = timedelta(days=1)
PARENT_CHECK = 1.0  # seconds between two checks whether the launcher is alive


def usable_cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Ranks:
    """This process among those of its job.

    Args:
        rank: of this process.
        size: number of processes.
        group: a process group over gloo, for Python objects; None: the default group.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes and shows what exists once."""
        return self.rank == 0

    def gather_call(self, action: Callable[[], T]) -> list[T]:
        """Call a function on every rank. Returns the results of all, by rank."""
        if self.size == 1:
            return [action()]
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        outcomes: list[tuple[T, str | None]] = [None] * self.size  # type: ignore[list-item]
        dist.all_gather_object(outcomes, (result, None if failure is None else str(failure)), group=self._group)
        if failure is not None:
            raise failure
        for rank, (_, reason) in enumerate(outcomes):
            if reason is not None:
                raise RankError(f"rank {rank}: {reason}")
        return [result for result, _ in outcomes]

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Call a function on rank 0. Returns its result on all ranks."""
        return self.gather_call(lambda: action() if self.first else None)[0]  # type: ignore[return-value]

    def local_rank0_first(self, action: Callable[[], T]) -> T:
        """Call a function on every rank, on one rank of each machine before the others, which find its files."""
        results: list[T] = []
        leads = self.size == 1 or os.environ.get("LOCAL_RANK", "0") == "0"
        for turn in (True, False):
            self.gather_call(lambda turn=turn: results.append(action()) if leads == turn else None)  # type: ignore[misc]
            if self.size == 1:
                break
        return results[0]

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sum each value over the ranks."""
        if self.size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return tuple(total.tolist())

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return self.sum(float(flag))[0] > 0


ALONE = Ranks()


def world_size() -> int:
    """Return the number of processes of the job, which torchrun puts into the environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(device: torch.device) -> Ranks:
    """Connect to the other processes of the job: over gloo, and over nccl for tensors on GPUs.

    The process group is destroyed when the process ends. If the launcher ends before that, even by `kill -9`, the
    process gets a SIGTERM within seconds.
    """
    if world_size() == 1:
        return ALONE
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _end_with_parent()
        store, rank, size = next(iter(dist.rendezvous("env://")))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.PrefixStore(_attempt(), store), rank=rank, world_size=size)
        atexit.register(leave)
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=TIMEOUT))


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def is_lost(error: BaseException) -> bool:
    """Return whether an error says that another process is gone or does not answer. Gloo has no class for that."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _attempt() -> str:
    """torchrun keeps one store over all its restarts, with the addresses of processes that are dead. With
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 it makes a new one each time."""
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return "sdm"
    return f"sdm-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{world_size()}"


def _end_with_parent() -> None:
    """Send this process a SIGTERM when its parent ends.

    A thread compares the parent's id, which works on every POSIX system. Linux's PR_SET_PDEATHSIG would also fire when
    only the parent's thread that started this process ends.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK)
        logger.warning("the launcher (process %d) is gone: ending", parent)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="sdm-parent", daemon=True).start()
