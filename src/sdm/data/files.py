"""Files and folders that are either complete or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that takes the name `path` when the block ends well and disappears when it does not.

    If another process was faster, its folder stays: both were made from the same input.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield temporary
        for folder in (temporary, *(child for child in temporary.rglob("*") if child.is_dir())):
            _sync_folder(folder)
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():
                raise
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    """A new name survives a power cut only once its folder is on the disk."""
    if os.name != "posix":  # other systems cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
