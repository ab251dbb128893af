"""The folder of a result: results.json, and while it is measured a journal of the units that are done.

results.json is an object under a checksum (`sdm.files.write_checked_json`):

    format        1
    measurement   its name
    settings      its settings
    model         name, path, parameters, vocabulary, context_limit, device, fingerprint
    data          what was measured on
    limit         units of each group that were asked for; null: all
    units         the result of each unit by its key
    planned       how many units there are without a limit
    complete      whether all of them are done
    summary       what the measurement makes of the units; null while there are none
    seconds       that measuring took, over all sessions
    versions      of sdm, torch, transformers and python

A unit is written to units-RANK.jsonl when it is done, a line with its checksum, and moves into results.json at the end
of the session. Lines that do not have their checksum are dropped, and their units measured again.

Measurement, settings, model and data identify a result. A folder that holds another result is left alone: the new one
goes beside it, into a folder with a checksum of its identity behind the name (`results_folder`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from sdm.errors import UserError
from sdm.files import (
    DamagedFile,
    explained,
    locked,
    parse_json,
    read_checked_json,
    read_json,
    write_bytes,
    write_checked_json,
)
from sdm.run.config_file import differences

FORMAT, FILE = 1, "results.json"
_log = logging.getLogger(__name__)
_PARTS = {
    "measurement": "another measurement",
    "settings": "other settings",
    "fingerprint": "another model",
    "data": "other data",
}


@dataclass
class Results:
    """The content of results.json."""

    measurement: str
    settings: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    planned: int = 0
    limit: int | None = None
    units: dict[str, dict[str, Any]] = field(default_factory=dict)
    complete: bool = False
    summary: dict[str, Any] | None = None
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def identity(self) -> dict[str, Any]:
        """What units have in common that may be put together."""
        return {
            "measurement": self.measurement,
            "settings": self.settings,
            "fingerprint": self.model.get("fingerprint"),
            "data": self.data,
        }

    def check_types(self, file: Path) -> None:
        """Raise a DamagedFile that names the field whose value is not of its type."""
        types: dict[str, Any] = {"limit": (int, type(None)), "summary": (dict, type(None)), "seconds": (int, float)}
        for entry in dataclasses.fields(self):
            default = entry.default if entry.default is not dataclasses.MISSING else {}
            expected = types.get(entry.name, str if entry.name == "measurement" else type(default))
            if not isinstance(value := getattr(self, entry.name), expected):
                raise DamagedFile(f"{file} is damaged: {entry.name} is of the wrong type, {type(value).__name__}")
        if not all(isinstance(result, dict) for result in self.units.values()):
            raise DamagedFile(f"{file} is damaged: the result of a unit must be an object")


def versions() -> dict[str, str]:
    """Versions of this package and of those that decide its numbers."""
    import sdm

    return {
        "sdm": sdm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def read_results(path: Path) -> Results:
    """Read the results in a folder or a file, finished or not, with the units of a session that was killed.

    Raises:
        UserError: if there are none, if they are damaged, or of another format.
    """
    file = path / FILE if path.is_dir() else path
    try:
        version = read_json(file).get("format")
        if version != FORMAT:
            raise UserError(
                f"{file} has format {version!r}, expected {FORMAT}; measure it again in another folder (--output)"
            )
        results = Results(**read_checked_json(file))
    except FileNotFoundError as error:
        raise UserError(f"{str(path)!r} holds no results: there is no {FILE}") from error
    except TypeError as error:
        raise DamagedFile(f"{file} is damaged: {error}") from error
    results.check_types(file)
    for journal in sorted(file.parent.glob("units-*.jsonl")):
        results.units |= _read_journal(journal)
    return results


def results_folder(folder: Path, identity: dict[str, Any], announce: bool = False) -> Path:
    """Choose where a result goes, or find where it went: `folder`, or FOLDER-CHECKSUM if that holds another result.

    Args:
        folder: the wanted place, such as evaluations/position of a run.
        identity: `Results.identity` of what is to be measured.
        announce: whether to log why the result goes elsewhere.
    """
    if not (folder / FILE).exists():
        return folder
    before = read_results(folder).identity()
    changes = {part: differences(before[part], identity[part], part) for part in _PARTS}
    part = next((part for part, changed in changes.items() if changed), None)
    if part is None:
        return folder
    beside = folder.with_name(f"{folder.name}-{_checksum(identity)[:8]}")
    if announce:
        shown = "; ".join(f"{name} was {_short(old)} and is {_short(new)}" for name, old, new in changes[part][:3])
        _log.info("%s holds results of %s (%s): these go into %s", folder, _PARTS[part], shown, beside)
    return beside


class ResultsFolder:
    """Where one measurement of one model is written. Units that are there already are taken over.

    Args:
        folder: the wanted place; `results_folder` decides whether it can be taken.
        wanted: the result to be measured, without units.
        rank: rank of this process, which has a journal of its own.
    """

    def __init__(self, folder: Path, wanted: Results, rank: int = 0) -> None:
        self.folder, self._rank, self._journal = results_folder(folder, wanted.identity(), rank == 0), rank, -1
        self.results = wanted
        if (self.folder / FILE).exists():
            before = read_results(self.folder)
            if _checksum(before.identity()) != _checksum(
                wanted.identity()
            ):  # a folder that was copied or renamed by hand
                raise UserError(f"{self.folder} holds another result than its name says; move it away")
            wanted.units, wanted.seconds = before.units, before.seconds
        elif self.folder.exists() and any(not file.name.startswith(".") for file in self.folder.iterdir()):
            raise UserError(
                f"{self.folder} holds other files and no {FILE}; results take a new or empty folder (--output)"
            )

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Write units within this context. One process at a time works in a folder, or the ranks of one job."""
        with explained(f"cannot write into {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            if self._rank == 0:
                if not stack.enter_context(locked(self.folder)) and os.name == "posix":
                    raise UserError(f"another process is measuring into {self.folder}")
                self.write()
            journal = self.folder / f"units-{self._rank}.jsonl"
            if journal.exists():  # of a session that was killed: its last line may be cut off
                lines = [_line(key, result) for key, result in _read_journal(journal).items()]
                write_bytes(journal, b"".join(lines))
            self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            stack.callback(self._close)
            yield

    def _close(self) -> None:
        os.close(self._journal)
        self._journal = -1

    def add(self, key: str, result: dict[str, Any]) -> None:
        """Write the result of a unit to the journal."""
        os.write(self._journal, _line(key, result))
        self.results.units[key] = result

    def gather(self) -> None:
        """Take over the units that all ranks have measured."""
        for journal in self.folder.glob("units-*.jsonl"):
            self.results.units |= _read_journal(journal)

    def write(self, settled: bool = False) -> None:
        """Write results.json with all units; once they are `settled`, the journals are removed."""
        write_checked_json(self.folder / FILE, vars(self.results))
        for journal in self.folder.glob("units-*.jsonl") if settled else ():
            journal.unlink()


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _checksum(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _line(key: str, result: dict[str, Any]) -> bytes:
    return json.dumps({"key": key, "result": result, "sha256": _checksum([key, result])}).encode() + b"\n"


def _read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Read what is complete. A line that was cut off or changed, by a kill or by the disk, is measured again."""
    units, dropped = {}, 0
    for line in path.read_bytes().splitlines():
        try:
            entry = parse_json(line)
            if entry.keys() != {"key", "result", "sha256"} or entry["sha256"] != _checksum(
                [entry["key"], entry["result"]]
            ):
                raise ValueError("it does not have its checksum")
            units[entry["key"]] = dict(entry["result"])
        except (ValueError, TypeError, AttributeError):
            dropped += 1
    if dropped:
        _log.info("%s: %d damaged lines are dropped, their units are measured again", path, dropped)
    return units
