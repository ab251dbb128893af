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

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from sdm.files import new_folder, write_json
from sdm.training.errors import TrainingError

FORMAT = 1
STATE, MANIFEST = "state.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or read."""


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
            if path.exists():
                shutil.rmtree(path)  # it is damaged: the run would have gone on from it
            with new_folder(path) as temporary:
                _save_tensors(temporary, tensors)
                write_json(temporary / STATE, {"format": FORMAT, "step": step} | state)
                entries = {file.name: _entry(file) for file in sorted(temporary.iterdir())}
                write_json(temporary / MANIFEST, entries)
        except (OSError, CheckpointException, SafetensorError) as error:
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
                shutil.rmtree(self.path(step))

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
        steps = self.steps()
        for step in reversed(steps):
            try:
                state = verify(self.path(step))
                take(state)
            except CheckpointError as error:
                announce(f"{error}; trying the one before")
            else:
                self._current = step
                return state
        if steps:
            raise CheckpointError(f"all {len(steps)} checkpoints in {self.folder} are damaged; start a new run")
        return None

    def load(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Fill `tensors` in place from a checkpoint that was checked."""
        path = self.path(step)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                flat = {name: x.reshape(1) if x.dim() == 0 else x for name, x in tensors.items()}
                dcp.load(flat, storage_reader=HuggingFaceStorageReader(str(path)))
        except (OSError, CheckpointException, SafetensorError) as error:
            raise CheckpointError(f"the checkpoint {path} cannot be read: {_reason(error)}") from error

    def remove_leftovers(self) -> None:
        """What a killed process was writing."""
        if self.folder.is_dir():
            for path in self.folder.glob(".step-*"):
                shutil.rmtree(path, ignore_errors=True)


def verify(path: Path) -> dict[str, Any]:
    """Compare every file with the manifest. Returns the state."""
    try:
        entries = json.loads((path / MANIFEST).read_bytes())
        if STATE not in entries or not any(name.endswith(".safetensors") for name in entries):
            raise CheckpointError(f"the checkpoint {path} is damaged: {MANIFEST} does not name all files")
        for name, entry in entries.items():
            if _entry(path / name) != entry:
                raise CheckpointError(f"the checkpoint {path} is damaged: {name} does not have its size and checksum")
        state = json.loads((path / STATE).read_bytes())
        found = state.get("format")
    except CheckpointError:
        raise
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {error}") from error
    if found != FORMAT:
        raise CheckpointError(f"the checkpoint {path} has format {found}, this version reads {FORMAT}")
    return state


def _save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    # A safetensors slice of a scalar does not exist: scalars are written as vectors of one.
    flat = {name: x.detach().reshape(1) if x.dim() == 0 else x.detach() for name, x in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(flat, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256") if hasattr(hashlib, "file_digest") else _digest(stream)
    return {"size": file.stat().st_size, "sha256": digest.hexdigest()}


def _digest(stream: Any) -> Any:
    digest = hashlib.sha256()
    while block := stream.read(2**20):
        digest.update(block)
    return digest


def _reason(error: BaseException) -> str:
    """What torch's wrapper of the errors of all ranks is about."""
    failures = getattr(error, "failures", None)
    if failures:
        return "; ".join(str(failure[0]) for failure in failures.values())
    return str(error)
