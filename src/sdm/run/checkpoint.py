"""The checkpoints of a run: the newest ones are kept, and a run is resumed from the newest undamaged one.

A checkpoint is a folder that is complete or absent, and is verified before it is used. All ranks write and read it
together; their number may differ between the two. Rank 0 creates the temporary folder, writes what is not a tensor, and
renames the folder once all ranks have finished.

Tensors are written by torch's distributed checkpoint, one file per rank. Its safetensors storage is used instead of the
default one, whose metadata is a pickle: loading a pickle runs whatever code it holds, and no checksum helps against a
malicious file. Everything else is JSON.

    step-00000100/
      shard-00001-model-00001-of-00001.safetensors
      state.json      format, step, configuration, JSON values of the trainer's state
      manifest.json   size and SHA-256 of the other files
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from sdm.errors import RankError, TrainingError
from sdm.files import (
    MANIFEST,
    DamagedFile,
    file_entry,
    new_folder,
    read_json,
    read_manifest,
    remove_folder,
    remove_leftovers,
    write_json,
)
from sdm.ranks import ALONE, Ranks

FORMAT = 1
STATE = "state.json"
_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or read."""


class ForeignFileError(TrainingError):
    """A file among the checkpoints does not belong to them. It is neither read nor removed."""

    def __init__(self, file: Path) -> None:
        super().__init__(f"{file} is not of this checkpoint ({MANIFEST} does not name it); move it elsewhere")


def verify(path: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Compare every file of a checkpoint with its manifest, each rank some of them.

    Returns:
        The content of state.json.

    Raises:
        CheckpointError: a file is missing or damaged.
        ForeignFileError: there is a file that the manifest does not name.
    """
    entries = read_entries(path)
    for name in list(entries)[ranks.rank :: ranks.size]:
        _check_entry(path, name, entries)
    state = read_state(path, entries)
    for file in _files(path):
        if file.name not in entries and file.name != MANIFEST:
            raise ForeignFileError(file)
    return state


def check_own(path: Path) -> None:
    """Raise a `ForeignFileError` unless all files have names that a checkpoint's files have."""
    for file in _files(path):
        if file.name not in (STATE, MANIFEST) and not _SHARD.fullmatch(file.name):
            raise ForeignFileError(file)


def read_entries(path: Path) -> dict[str, Any]:
    """Return the manifest's entries: size and checksum by file name."""
    try:
        entries = read_manifest(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {error}") from error
    if STATE not in entries or not any(name.endswith(".safetensors") for name in entries):
        raise CheckpointError(f"the checkpoint {path} is damaged: {MANIFEST} does not name all files")
    return entries


def read_state(path: Path, entries: dict[str, Any]) -> dict[str, Any]:
    """Return the content of state.json, verified against the manifest."""
    _check_entry(path, STATE, entries)
    try:
        state = read_json(path / STATE)
    except (OSError, DamagedFile) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {path} has format {state.get('format')!r}, this version of sdm reads {FORMAT}"
        )
    return state


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write the tensors, each rank its shards; an error on one rank is an error on all."""
    # A safetensors slice of a scalar does not exist: scalars are written as vectors of one.
    flat = {name: x.detach().reshape(1) if x.dim() == 0 else x.detach() for name, x in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(flat, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors`, or this rank's shards of them, in place from a verified checkpoint."""
    try:
        reader = HuggingFaceStorageReader(str(path))
        reader.fs = _Only(read_entries(path))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            flat = {name: x.reshape(1) if x.dim() == 0 else x for name, x in tensors.items()}
            dcp.load(flat, storage_reader=reader)
    except (OSError, CheckpointException, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return the message of an error, or those that torch has collected from all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        return "; ".join(str(failure[0]) for failure in failures.values())
    return str(error)


def _files(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error


def _check_entry(path: Path, name: str, entries: dict[str, Any]) -> None:
    try:
        same = file_entry(path / name) == entries[name]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {error}") from error
    if not same:
        raise CheckpointError(f"the checkpoint {path} is damaged: {name} does not have its size and checksum")


class _Only(FileSystem):
    """A folder of which only the named files are seen: torch reads every safetensors file that it finds."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(file) for file in sorted(Path(path).iterdir()) if file.name in self._names]


__all__ = ["CheckpointError", "CheckpointStore", "ForeignFileError", "verify"]

logger = logging.getLogger(__name__)

TRIES = 100  # attempts to read checkpoints that a running process replaces
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(step-\d{8,})-[0-9a-f]{8}")


class CheckpointStore:
    """The checkpoints of a run. All ranks call `save`, `newest` and `load` together.

    Args:
        folder: where they are.
        keep: how many of the newest to keep.
        ranks: the processes that write and read them.
        pinned: a step whose checkpoint is kept besides, such as the first of the decay.
    """

    def __init__(self, folder: Path, keep: int = 2, ranks: Ranks = ALONE, pinned: int | None = None) -> None:
        self.folder, self.keep, self.pinned, self._ranks = folder, keep, pinned, ranks
        self._current: int | None = None  # the step that was saved or restored last

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], prune: bool = True) -> Path:
        """Write a checkpoint, each rank its shards of the tensors, and drop old ones once it is complete.

        Args:
            step: the steps done.
            tensors: full tensors, or this rank's shards of them as DTensors.
            state: JSON values; those of rank 0 are written.
            prune: whether to drop old checkpoints.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: it cannot be written; the older ones are still there.
        """
        path, ranks = self.path(step), self._ranks
        if step == self._current:
            return path  # the same step of the same run is the same state

        def begin() -> Path:
            self._remove(step)  # if there is one, it is damaged: the run would have been resumed from it
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
        """Keep the last ones up to `newest`. Those after it are damaged: the run would have been resumed from them."""
        steps = self.steps()
        kept = [step for step in steps if step <= newest][-self.keep :]
        for step in steps:
            if step not in kept and (step != self.pinned or step > newest):
                with contextlib.suppress(ForeignFileError):
                    self._remove(step)

    def _remove(self, step: int) -> None:
        path = self.path(step)
        if path.exists():
            check_own(path)
            remove_folder(path)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def newest(
        self, restore: Callable[[dict[str, Any]], None] = lambda state: None, limit: int | None = None
    ) -> dict[str, Any] | None:
        """Return the state of the newest undamaged checkpoint; None if there is none at all.

        Args:
            restore: is called with the state, to load the tensors; a checkpoint for which it raises a
                `CheckpointError` counts as damaged.
            limit: the newest step to consider. Later checkpoints are removed once an earlier one is restored.
        """

        def read(path: Path) -> dict[str, Any]:
            state = self._ranks.gather_call(lambda: verify(path, self._ranks))[0]
            restore(state)
            self._current = state["step"]
            return state

        state = self._newest(read, self._ranks, limit)
        if limit is not None and state is not None:
            self._ranks.on_rank0(lambda: self._remove_after(limit))
        return state

    def _remove_after(self, limit: int) -> None:
        for step in self.steps():
            if step > limit:
                self._remove(step)

    def newest_state(self) -> dict[str, Any] | None:
        """Return the state of the newest checkpoint with an undamaged state.json; None if there is none.

        It is quick, because large files are not read.
        """
        with contextlib.suppress(CheckpointError):
            return self._newest(lambda path: read_state(path, read_entries(path)), ALONE, quiet=True)
        return None

    def _newest(
        self, read: Callable[[Path], dict[str, Any]], ranks: Ranks, limit: int | None = None, quiet: bool = False
    ) -> dict[str, Any] | None:
        """The first one, from the newest on, that can be read. A process that trains may replace them meanwhile."""

        def candidates() -> list[int]:
            return [step for step in self.steps() if limit is None or step <= limit]

        for _ in range(TRIES):
            steps = ranks.on_rank0(candidates)
            for path in map(self.path, reversed(steps)):
                try:
                    return read(path)
                except (CheckpointError, RankError) as error:
                    if path.exists() and not quiet and ranks.first:
                        logger.warning("%s; trying the one before", error)
            if not steps:
                return None
            if ranks.on_rank0(candidates) == steps:
                raise CheckpointError(
                    f"all {len(steps)} checkpoints in {self.folder} are damaged: restore one from a copy, or start a "
                    "new run in another folder"
                )
        raise CheckpointError(
            f"the checkpoints in {self.folder} are replaced faster than they are read; raise checkpoint.keep or "
            "checkpoint.every of the run that writes them"
        )

    def check_own(self) -> None:
        """Raise a `ForeignFileError` if there is a file that a run has not written, damaged or not."""
        for step in self.steps():
            check_own(self.path(step))

    def load(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Fill `tensors`, or this rank's shards of them, in place from a verified checkpoint."""
        load_tensors(self.path(step), tensors)

    def remove_leftovers(self) -> None:
        """Remove what a killed process was writing or removing."""
        if self.folder.is_dir():
            for name in {match.group(1) for path in self.folder.iterdir() if (match := _LEFTOVER.fullmatch(path.name))}:
                remove_leftovers(self.folder / name)
