"""Files and folders that are either complete or not there."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary name that becomes `path` when the block ends well; when it does not, nothing is left of it.

    It has the suffix of `path`, and is on the disk before it takes the name.
    """
    temporary = path.with_name(f".{secrets.token_hex(4)}-{path.name}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    with new_file(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


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
