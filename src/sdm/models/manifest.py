"""The size and SHA-256 of every file of a folder, beside them: what was written is what is read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from sdm.errors import UserError
from sdm.files import open_regular, read_json, write_json

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
