"""A run is a folder of its own: one process at a time works in it, and its configuration stays what it was."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdm.data.tokenization import Tokenizer, keep_tokenizer
from sdm.files import new_folder, remove_leftovers
from sdm.models.manifest import file_entries, file_entry
from sdm.training.checkpoint import CheckpointStore
from sdm.training.config import TrainConfig
from sdm.training.config_file import KIND, differences, from_json, read_config, to_json, write_config
from sdm.training.errors import TrainingError

CONFIG, CHECKPOINTS, TOKENIZER = "run.json", "checkpoints", "tokenizer"
MARKER = ".sdm-run"  # says that a folder is a run's; who trains in it holds its lock
_PARTIAL = re.compile(r"\.[0-9a-f]{8}-(run\.json|metrics\.jsonl)")

# Fields that may change when a run is continued: they change what is shown and kept, not what is computed.
FREE = (
    "checkpoint.",
    "compute.checkpointing",
    "compute.compile",
    "compute.device",
    "compute.segment_length",
    "compute.threads",
    "data.cache_dir",
    "data.verify",
    "guard.",
    "init_from",
    "monitor.",
)


def claim(folder: Path, config: TrainConfig) -> int:
    """Make the folder, or check that it is a run's, and of this configuration if anything was trained in it. Returns
    the lock: keep it open."""
    mark(folder)
    lock = _lock(folder)
    try:
        store = CheckpointStore(folder / CHECKPOINTS)
        store.check_own()
        _check_unchanged(folder, store.newest_state(), config)
        for file in folder.iterdir():
            if _PARTIAL.fullmatch(file.name):  # what a killed process was writing
                file.unlink()
    except BaseException:
        release(lock)
        raise
    return lock


def mark(folder: Path) -> None:
    """Make a folder a run's. One that holds the files of others is refused: a run's would replace some of them."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MARKER).exists() or _is_older_run(folder):
        return
    foreign = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if foreign:
        raise TrainingError(
            f"--run-dir: {folder} is not a run's folder and holds {foreign[0]}; a run takes a new or empty folder"
        )
    (folder / MARKER).touch()


def _is_older_run(folder: Path) -> bool:
    """Runs that began before there was a marker are known by their configuration."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        if json.loads((folder / CONFIG).read_bytes())[KIND] == TrainConfig.__name__:
            return True
    return CheckpointStore(folder / CHECKPOINTS).newest_state() is not None


def has_begun(folder: Path) -> bool:
    """Whether there is a checkpoint, damaged or not: without one there is nothing to lose."""
    return bool(CheckpointStore(folder / CHECKPOINTS).steps())


def configuration(folder: Path) -> TrainConfig:
    """That of the newest checkpoint, or of run.json while there is none."""
    state = CheckpointStore(folder / CHECKPOINTS).newest_state()
    return read_config(folder / CONFIG) if state is None else from_json(TrainConfig, state["config"])


def record(folder: Path, config: TrainConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Write down what the run is, and at its start the tokenizer: text that changes later may give another one. Returns
    the tokenizer's files with their checksums, for the checkpoints."""
    remove_leftovers(folder / TOKENIZER)
    if tokenizer is not None and not has_begun(folder):
        with new_folder(folder / TOKENIZER, replace=True) as temporary:
            keep_tokenizer(tokenizer, temporary)
    write_config(folder / CONFIG, config)
    return file_entries(folder / TOKENIZER) if (folder / TOKENIZER).is_dir() else {}


def recorded_tokenizer(folder: Path) -> Path | None:
    """Where the tokenizer is that the run began with; None for a run without one, or of an older version."""
    path = folder.absolute() / TOKENIZER
    state = CheckpointStore(folder / CHECKPOINTS).newest_state()
    for name, entry in ({} if state is None else state.get(TOKENIZER, {})).items():
        if not (path / name).is_file() or file_entry(path / name) != entry:
            raise TrainingError(f"{path / name} is not what the run began with; restore it from a copy")
    return path if has_begun(folder) and path.is_dir() else None


def release(lock: int) -> None:
    if lock >= 0:
        os.close(lock)


def _check_unchanged(folder: Path, state: dict[str, Any] | None, config: TrainConfig) -> None:
    """The configuration in a checkpoint is under a checksum, and counts; run.json is for those who look on."""
    if state is None:
        return
    before, now = (
        # What is left open and what was written out may be the same.
        to_json(replace(one, schedule=one.schedule.resolved()))
        for one in (from_json(TrainConfig, state["config"]), config)
    )
    changed = [entry for entry in differences(before, now) if not _free(entry[0])]
    if changed:
        what = "; ".join(f"{name} was {old!r} and is {new!r}" for name, old, new in changed[:5])
        raise TrainingError(
            f"the run in {folder} was started with another configuration: {what}. `sdm train {folder.absolute()}` "
            "continues it as it was; take another folder (--run-dir) for a new run; --init-from starts from its weights"
        )


def _free(name: str) -> bool:
    return any(name == entry or (entry.endswith(".") and name.startswith(entry)) for entry in FREE)


def _lock(folder: Path) -> int:
    """An advisory lock that ends with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return -1
    lock = os.open(folder / MARKER, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise TrainingError(f"another process is training in {folder}") from error
    return lock
