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

A unit is written to units-RANK.jsonl when it is done, and moves into results.json at the end of the session.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from sdm.errors import UserError
from sdm.files import DamagedFile, locked, parse_json, read_checked_json, read_json, write_bytes, write_checked_json
from sdm.run.config_file import differences

FORMAT, FILE = 1, "results.json"
IDENTITY = ("measurement", "settings", "fingerprint", "data")


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
        return {
            "measurement": self.measurement,
            "settings": self.settings,
            "fingerprint": self.model.get("fingerprint"),
            "data": self.data,
        }


def versions() -> dict[str, str]:
    import sdm

    return {
        "sdm": sdm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def read_results(path: Path) -> Results:
    """The results in a folder or a file, finished or not, with the units of a session that was killed."""
    file = path / FILE if path.is_dir() else path
    try:
        found = read_json(file).get("format")
        if found != FORMAT:
            raise UserError(f"{file} has format {found!r}, expected {FORMAT}")
        content = read_checked_json(file)
        results = Results(**content)
    except FileNotFoundError as error:
        raise UserError(f"{str(path)!r} holds no results: there is no {FILE}") from error
    except TypeError as error:
        raise DamagedFile(f"{file} is damaged: {error}") from error
    for journal in sorted(file.parent.glob("units-*.jsonl")):
        results.units |= _read_journal(journal)
    return results


class ResultsFolder:
    """Where one measurement of one model is kept. What is there already must be of the same, or nothing is touched."""

    def __init__(self, folder: Path, wanted: Results, rank: int = 0) -> None:
        self.folder, self._rank, self._journal = folder, rank, -1
        self.results = wanted
        if (folder / FILE).exists():
            before = read_results(folder)
            check_same(folder, before.identity(), wanted.identity())
            wanted.units, wanted.seconds = before.units, before.seconds
        elif folder.exists() and any(not file.name.startswith(".") for file in folder.iterdir()):
            raise UserError(f"{folder} holds other files and no {FILE}; results take a new or empty folder (--output)")

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """While units are measured. One process at a time works in a folder, or the ranks of one job."""
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
        """Keep the result of a unit."""
        os.write(self._journal, _line(key, result))
        self.results.units[key] = result

    def gather(self) -> None:
        """Take up what all ranks have measured."""
        for journal in self.folder.glob("units-*.jsonl"):
            self.results.units |= _read_journal(journal)

    def write(self, settled: bool = False) -> None:
        """Write results.json with all units. Once they are `settled`, the journals have nothing more to say."""
        write_checked_json(self.folder / FILE, vars(self.results))
        for journal in self.folder.glob("units-*.jsonl") if settled else ():
            journal.unlink()


def check_same(folder: Path, before: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise unless results are of the same measurement of the same model on the same data."""
    whose = ("another measurement", "other settings", "another model", "other data")
    for part, what in zip(IDENTITY, whose, strict=True):
        changed = differences(before[part], wanted[part], part)
        if changed:
            shown = "; ".join(f"{name} was {_short(old)} and is {_short(new)}" for name, old, new in changed[:3])
            raise UserError(
                f"the results in {folder} are of {what}: {shown}. They are left as they are; take another "
                "folder with --output, or delete them"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line(key: str, result: dict[str, Any]) -> bytes:
    return json.dumps({"key": key, "result": result}).encode() + b"\n"


def _read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """What is complete. A line that was cut off, by a kill or a full disk, is measured again."""
    units = {}
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = parse_json(line)
            units[entry["key"]] = dict(entry["result"])
    return units
