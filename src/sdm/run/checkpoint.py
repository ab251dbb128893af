"""The checkpoints of a run: the newest ones are kept, and the newest one that is whole is continued from.

Ranks write one checkpoint together and read it together, whatever their number was when it was written. The first rank
draws the folder's temporary name, writes what is not a tensor, and gives the folder its name once all have finished.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from sdm.errors import RankError
from sdm.files import new_folder, remove_folder, remove_leftovers, write_json
from sdm.models.manifest import MANIFEST, file_entry
from sdm.ranks import ALONE, Ranks
from sdm.run.checkpoint_folder import (
    FORMAT,
    STATE,
    CheckpointError,
    ForeignFileError,
    check_own,
    load_tensors,
    read_entries,
    read_state,
    reason,
    save_tensors,
    verify,
)

__all__ = ["CheckpointError", "CheckpointStore", "ForeignFileError", "verify"]

TRIES = 100  # readings of checkpoints that a running process replaces
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(step-\d{8,})-[0-9a-f]{8}")


class CheckpointStore:
    """The checkpoints of a run, the last `keep` of them. What is said to be done by ranks, all of them call."""

    def __init__(self, folder: Path, keep: int = 2, ranks: Ranks = ALONE) -> None:
        self.folder, self.keep, self._ranks = folder, keep, ranks
        self._current: int | None = None  # the step that was saved or taken up last

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], prune: bool = True) -> Path:
        """Write a checkpoint and, with `prune`, drop those that are too old. On failure they are all still there.
        By ranks: each writes its shares of the tensors; the state is that of the first."""
        path, ranks = self.path(step), self._ranks
        if step == self._current:
            return path  # the same step of the same run is the same state

        def begin() -> Path:
            self._remove(step)  # if there is one, it is damaged: the run would have gone on from it
            return stack.enter_context(new_folder(path))

        def complete() -> None:
            write_json(temporary / STATE, {"format": FORMAT, "step": step} | state)
            write_json(temporary / MANIFEST, entries | {STATE: file_entry(temporary / STATE)})
            stack.close()  # gives the folder its name

        try:
            with contextlib.ExitStack() as stack:
                temporary = ranks.on_rank0(begin)
                save_tensors(temporary, tensors)
                entries = dict(
                    chain(*(written.items() for written in ranks.gather_call(lambda: self._written(temporary))))
                )
                ranks.on_rank0(complete)
        except (OSError, ForeignFileError, CheckpointException, SafetensorError, RankError) as error:
            newest = max(self.steps(), default=None)
            kept = "there is no older one" if newest is None else f"step {newest} is the newest complete one"
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written: {reason(error)}; {kept}"
            ) from error
        self._current = step
        if prune:
            ranks.on_rank0(lambda: self._prune(step))
        return path

    def _written(self, folder: Path) -> dict[str, Any]:
        """Size and checksum of what this rank has written."""
        return {file.name: file_entry(file) for file in folder.glob(f"shard-{self._ranks.rank + 1:05d}-*")}

    def _prune(self, newest: int) -> None:
        """Keep the last ones up to `newest`. Those after it are damaged: the run would have gone on from them."""
        steps = self.steps()
        kept = [step for step in steps if step <= newest][-self.keep :]
        for step in steps:
            if step not in kept:
                with contextlib.suppress(ForeignFileError):
                    self._remove(step)

    def _remove(self, step: int) -> None:
        path = self.path(step)
        if path.exists():
            check_own(path)
            remove_folder(path)

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match.group(1)) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def newest(
        self,
        announce: Callable[[str], None] = lambda message: None,
        take: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> dict[str, Any] | None:
        """The state of the newest undamaged checkpoint, None if there is none at all. `take` is given the state to load
        what belongs to it; when that fails, the checkpoint counts as damaged. By ranks."""

        def read(path: Path) -> dict[str, Any]:
            state = self._ranks.gather_call(lambda: verify(path, self._ranks))[0]
            take(state)
            self._current = state["step"]
            return state

        return self._newest(read, announce, self._ranks)

    def newest_state(self) -> dict[str, Any] | None:
        """The state of the newest checkpoint whose state is whole; None if there is none. Large files are not read, so
        that this is quick."""
        with contextlib.suppress(CheckpointError):
            return self._newest(lambda path: read_state(path, read_entries(path)), lambda message: None, ALONE)
        return None

    def _newest(
        self, read: Callable[[Path], dict[str, Any]], announce: Callable[[str], None], ranks: Ranks
    ) -> dict[str, Any] | None:
        """The first one, from the newest on, that can be read. A process that trains may replace them meanwhile."""
        for _ in range(TRIES):
            steps = ranks.on_rank0(self.steps)
            for path in map(self.path, reversed(steps)):
                try:
                    return read(path)
                except (CheckpointError, RankError) as error:
                    if path.exists():
                        announce(f"{error}; trying the one before")
            if not steps:
                return None
            if ranks.on_rank0(self.steps) == steps:
                raise CheckpointError(
                    f"all {len(steps)} checkpoints in {self.folder} are damaged: restore one from a copy, or start a "
                    "new run in another folder"
                )
        raise CheckpointError(
            f"the checkpoints in {self.folder} are replaced faster than they are read; raise checkpoint.keep or "
            "checkpoint.every of the run that writes them"
        )

    def check_own(self) -> None:
        """Raise if there is anything that a run has not written. What is damaged is no less its own."""
        for step in self.steps():
            check_own(self.path(step))

    def load(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Fill `tensors`, or this rank's shares of them, in place from a checkpoint that was checked. By ranks."""
        load_tensors(self.path(step), tensors)

    def remove_leftovers(self) -> None:
        """What a killed process was writing or removing."""
        if self.folder.is_dir():
            for name in {match.group(1) for path in self.folder.iterdir() if (match := _LEFTOVER.fullmatch(path.name))}:
                remove_leftovers(self.folder / name)
