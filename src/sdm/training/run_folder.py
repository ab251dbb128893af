"""A run is a folder: one process at a time works in it, and its configuration stays what it was."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from sdm.data.tokenization import Tokenizer, keep_tokenizer
from sdm.training.checkpoint import CheckpointStore
from sdm.training.config import TrainConfig
from sdm.training.config_file import differences, read_config, to_json, write_config
from sdm.training.errors import TrainingError

CONFIG, CHECKPOINTS, TOKENIZER = "run.json", "checkpoints", "tokenizer"

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
    """Make the folder, or check that what was trained in it had this configuration. Returns the lock: keep it open."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    try:
        if (folder / CONFIG).is_file() and has_begun(folder):
            _check_unchanged(folder, config)
    except BaseException:
        release(lock)
        raise
    return lock


def has_begun(folder: Path) -> bool:
    """Whether there is a checkpoint, damaged or not: without one there is nothing to lose."""
    return bool(CheckpointStore(folder / CHECKPOINTS).steps())


def record(folder: Path, config: TrainConfig, tokenizer: Tokenizer | None) -> None:
    """Write down what the run is, and at its start the tokenizer: text that changes later may give another one."""
    if tokenizer is not None and not has_begun(folder):
        keep_tokenizer(tokenizer, folder / TOKENIZER)
    write_config(folder / CONFIG, config)


def recorded_tokenizer(folder: Path) -> Path | None:
    """Where the tokenizer is that the run began with; None for a run without one, or of an older version."""
    path = folder.absolute() / TOKENIZER
    return path if has_begun(folder) and path.is_dir() else None


def release(lock: int) -> None:
    if lock >= 0:
        os.close(lock)


def _check_unchanged(folder: Path, config: TrainConfig) -> None:
    before, now = (
        # What is left open and what was written out may be the same.
        to_json(replace(one, schedule=one.schedule.resolved()))
        for one in (read_config(folder / CONFIG), config)
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
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise TrainingError(f"another process is training in {folder}") from error
    return lock
