"""Files and folders that are complete or absent, and are read without trust in their content.

A manifest beside the files of a folder has the size and SHA-256 of each: what was written is what is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

from sdm.errors import UserError

Json: TypeAlias = Any
"""A value as `json` reads and writes it. Whoever uses it checks its shape: a recursive type would not know more."""
CHECKSUM = "sha256"

LARGEST_JSON = 2**28  # bytes; the largest tokenizers are a tenth of that


class DamagedFile(UserError):
    """A file has wrong content. The message names the file."""


@contextlib.contextmanager
def explained(attempt: str) -> Iterator[None]:
    """Turn any error of a block into a `UserError` of one line that names what was attempted."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{attempt}: {' '.join(str(error).split())}") from error


def printable(path: str | Path) -> str:
    """Return a path as text that can be written anywhere: bytes that are no UTF-8 are shown as escapes."""
    return str(path).encode(errors="backslashreplace").decode()


def file_identity(path: Path) -> tuple[int, int, int]:
    """Return numbers of which some change when a file is replaced."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read. Pipes and devices, which may block or never end, raise an OSError."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def parse_json(data: bytes) -> Json:
    """Parse a JSON text; anything wrong with it raises a ValueError of one line."""
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        DamagedFile: the content is wrong.
        OSError: the file cannot be opened.
    """
    with open_regular(path) as file:
        data = file.read(LARGEST_JSON + 1)
    try:
        if len(data) > LARGEST_JSON:
            raise ValueError(f"it is larger than {LARGEST_JSON} bytes")
        value = parse_json(data)
    except ValueError as error:
        raise DamagedFile(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} is damaged: it must hold an object, got {type(value).__name__}")
    return value


def read_checked_json(path: Path) -> dict[str, Any]:
    """Read what `write_checked_json` wrote; a wrong checksum raises a `DamagedFile`."""
    value = read_json(path)
    if value.pop(CHECKSUM, None) != _checksum(value):
        raise DamagedFile(f"{path} is damaged: it does not have its checksum")
    return value


def write_checked_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object together with its checksum."""
    write_json(path, value | {CHECKSUM: _checksum(value)})


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name that becomes `path` when the block succeeds; if it fails, nothing is left.

    The name has the suffix of `path`. The file is synced to the disk before it is renamed.
    """
    temporary = path.with_name(f".{secrets.token_hex(4)}-{path.name}")
    try:
        yield temporary
        _let_read(temporary)
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, complete or not at all."""
    with new_file(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file, complete or not at all."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


@contextlib.contextmanager
def new_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` when the block succeeds, and removed if it fails.

    Its content is synced to the disk before it is renamed. With `replace`, an existing folder is removed. Without, the
    existing one stays: if another process was faster, both were made from the same input.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        with locked(temporary):
            yield temporary
            parts = list(temporary.rglob("*"))
            _let_read(*(part for part in parts if part.is_file()))
            for part in (*parts, temporary):
                _sync(part)
            if replace:
                remove_folder(path)
            try:
                temporary.rename(path)
            except OSError:
                if not path.is_dir():
                    raise
            _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder, if it exists, such that no other process sees a part of it."""
    aside = path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        shutil.rmtree(aside)


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes left of `new_folder(path)` or `remove_folder(path)`. Folders being written are
    locked, and stay."""
    if not path.parent.is_dir():
        return
    ours = re.compile(re.escape(_prefix(path)) + "[0-9a-f]{8}")
    for folder in list(path.parent.iterdir()):
        if ours.fullmatch(folder.name):
            with locked(folder) as free:
                if free:
                    shutil.rmtree(folder, ignore_errors=True)


def _prefix(path: Path) -> str:
    return f".{path.name}-"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold an advisory lock on a folder, which ends with the process. Yields whether it could be acquired."""
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


def _let_read(*files: Path) -> None:
    """Give files the permissions of the user's new files: some libraries write files that only the owner can read."""
    for folder in {file.parent for file in files}:
        # The umask itself can only be read by changing it, for all threads; and a folder may have rules of its own.
        probe = folder / f".{secrets.token_hex(4)}"
        probe.touch()
        mode = stat.S_IMODE(probe.stat().st_mode)
        probe.unlink()
        for file in files:
            if file.parent == folder:
                file.chmod(mode)


def _sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk, so that they survive a power cut."""
    posix = os.name == "posix"
    if not posix and path.is_dir():  # other systems cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if posix else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder that is otherwise complete."""
    write_json(folder / MANIFEST, file_entries(folder))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The entries by file name. Raises OSError or DamagedFile if there are none."""
    return read_json(folder / MANIFEST)


def file_entries(folder: Path) -> dict[str, Any]:
    """Of the files that are there, all but the manifest."""
    return {file.name: file_entry(file) for file in sorted(folder.iterdir()) if file.name != MANIFEST}


def file_entry(file: Path) -> dict[str, Any]:
    """Size and SHA-256 of one file."""
    with open_regular(file) as stream:
        digest = hashlib.file_digest(stream, "sha256")
    return {"size": file.stat().st_size, "sha256": digest.hexdigest()}


def check_manifest(folder: Path) -> None:
    """Raise unless the files of a saved model are those that were written. Without a manifest there is
    nothing to compare with: the folder is of an older version, or another program wrote it."""
    if not (folder / MANIFEST).is_file():
        return
    advice = f"export the model again, or remove {MANIFEST} if you have changed it yourself"
    try:
        entries = read_manifest(folder)
        damaged = [name for name, entry in entries.items() if file_entry(folder / name) != entry]
    except (OSError, ValueError) as error:
        raise UserError(f"the model in {folder} is damaged: {error}; {advice}") from error
    for name in damaged:
        raise UserError(f"{folder / name} is damaged: it is not what was exported; {advice}")
    for file in sorted(folder.iterdir()):
        # Transformers looks for files of many names. Those that people add for each other it does not read.
        remark = file.name.startswith((".", "LICENSE")) or file.suffix in (".md", ".png")
        if file.name not in entries and file.name != MANIFEST and not remark:
            raise UserError(f"{file} is not of the export beside it; move it elsewhere, or {advice}")
