"""A run is a folder: one process at a time works in it, and its configuration stays what it was."""

from __future__ import annotations

import os
from pathlib import Path

from sdm.training.config import TrainConfig
from sdm.training.config_file import differences, read_config, to_json, write_config
from sdm.training.errors import TrainingError

CONFIG, CHECKPOINTS = "run.json", "checkpoints"

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
    """Make the folder or check that it belongs to this configuration. Returns the lock: keep it open."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    path = folder / CONFIG
    if path.is_file():
        changed = [entry for entry in differences(to_json(read_config(path)), to_json(config)) if not _free(entry[0])]
        if changed:
            what = "; ".join(f"{name} was {old!r} and is {new!r}" for name, old, new in changed[:5])
            release(lock)
            raise TrainingError(
                f"the run in {folder} was started with another configuration: {what}. Take the old values to continue "
                "it, or another folder (--run-dir) for a new run; --init-from starts from its weights"
            )
    write_config(path, config)
    return lock


def release(lock: int) -> None:
    if lock >= 0:
        os.close(lock)


def _free(name: str) -> bool:
    return any(name == entry or (entry.endswith(".") and name.startswith(entry)) for entry in FREE)


def _lock(folder: Path) -> int:
    """An advisory lock that ends with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return -1
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise TrainingError(f"another process is training in {folder}") from error
    return lock
