"""One checkpoint: a folder that is complete or absent, and is verified before it is used.

Tensors are written by torch's distributed checkpoint, one file per rank, so that a run can be resumed with another
number of ranks. Its safetensors storage is used instead of the default one, whose metadata is a pickle: loading a
pickle runs whatever code it holds, and no checksum helps against a malicious file. Everything else is JSON.

    step-00000100/
      shard-00001-model-00001-of-00001.safetensors
      state.json      format, step, configuration, JSON values of the trainer's state
      manifest.json   size and SHA-256 of the other files
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from sdm.files import DamagedFile, read_json
from sdm.models.manifest import MANIFEST, file_entry, read_manifest
from sdm.ranks import ALONE, Ranks
from sdm.run.errors import TrainingError

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
