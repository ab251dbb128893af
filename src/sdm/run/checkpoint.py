"""Checkpoints that are complete or not there, and are checked before they are used.

Tensors are written by torch's distributed checkpoint, one file per rank, so that a run can go on with another number
of ranks. Its safetensors storage is used instead of the default one, whose metadata is a pickle: loading a pickle runs
whatever code it holds, and no checksum helps against a file that was made to do harm. Everything else is JSON.

    step-00000100/
      shard-00001-model-00001-of-00001.safetensors
      state.json      step, position in the data, configuration, ...
      manifest.json   size and SHA-256 of the other files
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from sdm.files import DamagedFile, new_folder, read_json, remove_folder, remove_leftovers, write_json
from sdm.models.manifest import MANIFEST, file_entry, read_manifest, write_manifest
from sdm.run.errors import TrainingError

FORMAT = 1
STATE = "state.json"
TRIES = 100  # readings of checkpoints that a running process replaces
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(step-\d{8,})-[0-9a-f]{8}")
_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or read."""


class ForeignFileError(TrainingError):
    """There is a file among the checkpoints that is not theirs. It is neither read nor removed."""

    def __init__(self, file: Path) -> None:
        super().__init__(f"{file} is not of this checkpoint ({MANIFEST} does not name it); move it elsewhere")


class CheckpointStore:
    """The checkpoints of a run, the last `keep` of them."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        self._current: int | None = None  # the step that was saved or taken up last

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], prune: bool = True) -> Path:
        """Write a checkpoint and, with `prune`, drop those that are too old. On failure they are all still there."""
        path = self.path(step)
        if step == self._current:
            return path  # the same step of the same run is the same state
        try:
            self._remove(step)  # if there is one, it is damaged: the run would have gone on from it
            with new_folder(path) as temporary:
                _save_tensors(temporary, tensors)
                write_json(temporary / STATE, {"format": FORMAT, "step": step} | state)
                write_manifest(temporary)
        except (OSError, ForeignFileError, CheckpointException, SafetensorError) as error:
            newest = max(self.steps(), default=None)
            kept = "there is no older one" if newest is None else f"step {newest} is the newest complete one"
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written: {_reason(error)}; {kept}"
            ) from error
        self._current = step
        if prune:
            self._prune(step)
        return path

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
        what belongs to it; when that fails, the checkpoint counts as damaged."""

        def read(path: Path) -> dict[str, Any]:
            state = verify(path)
            take(state)
            self._current = state["step"]
            return state

        return self._newest(read, announce)

    def newest_state(self) -> dict[str, Any] | None:
        """The state of the newest checkpoint whose state is whole; None if there is none. Large files are not read, so
        that this is quick."""
        with contextlib.suppress(CheckpointError):
            return self._newest(lambda path: _read_state(path, _read_manifest(path)), lambda message: None)
        return None

    def _newest(self, read: Callable[[Path], dict[str, Any]], announce: Callable[[str], None]) -> dict[str, Any] | None:
        """The first one, from the newest on, that can be read. A process that trains may replace them meanwhile."""
        for _ in range(TRIES):
            steps = self.steps()
            for path in map(self.path, reversed(steps)):
                try:
                    return read(path)
                except CheckpointError as error:
                    if path.exists():
                        announce(f"{error}; trying the one before")
            if not steps:
                return None
            if self.steps() == steps:
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
        """Fill `tensors` in place from a checkpoint that was checked."""
        path = self.path(step)
        try:
            reader = HuggingFaceStorageReader(str(path))
            reader.fs = _Only(_read_manifest(path))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                flat = {name: x.reshape(1) if x.dim() == 0 else x for name, x in tensors.items()}
                dcp.load(flat, storage_reader=reader)
        except (OSError, CheckpointException, SafetensorError) as error:
            raise CheckpointError(f"the checkpoint {path} cannot be read: {_reason(error)}") from error

    def remove_leftovers(self) -> None:
        """What a killed process was writing or removing."""
        if self.folder.is_dir():
            for name in {match.group(1) for path in self.folder.iterdir() if (match := _LEFTOVER.fullmatch(path.name))}:
                remove_leftovers(self.folder / name)


def verify(path: Path) -> dict[str, Any]:
    """Compare every file with the manifest, which names them all. Returns the state."""
    entries = _read_manifest(path)
    for name in entries:
        _check_entry(path, name, entries)
    state = _read_state(path, entries)
    for file in _files(path):
        if file.name not in entries and file.name != MANIFEST:
            raise ForeignFileError(file)
    return state


def check_own(path: Path) -> None:
    """Raise unless all files have names that those of a checkpoint have."""
    for file in _files(path):
        if file.name not in (STATE, MANIFEST) and not _SHARD.fullmatch(file.name):
            raise ForeignFileError(file)


def _files(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        entries = read_manifest(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {error}") from error
    if STATE not in entries or not any(name.endswith(".safetensors") for name in entries):
        raise CheckpointError(f"the checkpoint {path} is damaged: {MANIFEST} does not name all files")
    return entries


def _read_state(path: Path, entries: dict[str, Any]) -> dict[str, Any]:
    _check_entry(path, STATE, entries)
    try:
        state = read_json(path / STATE)
    except (OSError, DamagedFile) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {error}") from error
    found = state.get("format")
    if found != FORMAT:
        raise CheckpointError(f"the checkpoint {path} has format {found}, this version reads {FORMAT}")
    return state


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


def _save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    # A safetensors slice of a scalar does not exist: scalars are written as vectors of one.
    flat = {name: x.detach().reshape(1) if x.dim() == 0 else x.detach() for name, x in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(flat, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def _reason(error: BaseException) -> str:
    """What torch's wrapper of the errors of all ranks is about."""
    failures = getattr(error, "failures", None)
    if failures:
        return "; ".join(str(failure[0]) for failure in failures.values())
    return str(error)
