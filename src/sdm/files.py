"""Files and folders that are either complete or not there."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
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
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
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

    What is in it is on the disk before it takes the name. If another process was faster, its folder stays: both were
    made from the same input.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        with _locked(temporary):
            yield temporary
            for part in (*temporary.rglob("*"), temporary):
                _sync(part)
            try:
                temporary.rename(path)
            except OSError:
                if not path.is_dir():
                    raise
            _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed left of `new_folder(path)`; what is being written is locked and stays."""
    if not path.parent.is_dir():
        return
    for folder in list(path.parent.iterdir()):
        if folder.name.startswith(_prefix(path)):
            with _locked(folder) as free:
                if free:
                    shutil.rmtree(folder, ignore_errors=True)


def _prefix(path: Path) -> str:
    return f".{path.name}-"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """An advisory lock that ends with the process, however it ends. Says whether it could be had."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # no such locks on this system, or the folder has just gone
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:
            free = False
        yield free
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk: only then do they survive a power cut."""
    posix = os.name == "posix"
    if not posix and path.is_dir():  # other systems cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if posix else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
