"""A run is a folder of its own: one process at a time works in it, and its configuration stays what it was."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdm.data.tokenization import Tokenizer, keep_tokenizer
from sdm.files import DamagedFile, new_folder, parse_json, read_json, remove_leftovers
from sdm.models.manifest import file_entries, file_entry
from sdm.ranks import ALONE, Ranks
from sdm.run.checkpoint import CheckpointStore
from sdm.run.config import TrainConfig
from sdm.run.config_file import KIND, differences, from_json, read_config, to_json, write_config
from sdm.run.errors import TrainingError

CONFIG, CHECKPOINTS, TOKENIZER, EXPORT = "run.json", "checkpoints", "tokenizer", "export"
METRICS, RESULTS, FIGURES = "metrics.jsonl", "evaluation.json", "figures"
EVALUATIONS = "evaluations"
MARKER = ".sdm-run"  # says that a folder is a run's; who trains in it holds its lock
_PARTIAL = re.compile(r"\.[0-9a-f]{8}(-(run\.json|metrics\.jsonl))?")

# Fields that may change when a run is continued: they change what is shown and kept, not what is computed.
FREE = (
    "checkpoint.",
    "compute.checkpointing",
    "compute.compile",
    "compute.device",
    "compute.mesh.",
    "compute.segment_length",
    "compute.threads",
    "data.cache_dir",
    "data.verify",
    "guard.",
    "init_from",
    "monitor.",
)


class Run:
    """Everything that is known of a run's folder. Making one neither makes nor reads any file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.export = folder / EXPORT  # the model for transformers
        self.tokenizer = folder / TOKENIZER  # as it was when the run began
        self.metrics_file = folder / METRICS
        self.results = folder / RESULTS  # what was measured of the model
        self.evaluations = folder / EVALUATIONS  # a folder for each measurement
        self.figures = folder / FIGURES
        self._lock = -1

    @classmethod
    def around(cls, path: Path) -> Run | None:
        """The run that a folder is of: itself, or as its export."""
        for run in (cls(path), cls(path.parent)):
            if run.exists() and not any(run.folder.glob("*.safetensors")):
                return run
        return None

    def exists(self) -> bool:
        return (self.folder / CONFIG).is_file() or self.has_begun()

    def has_begun(self) -> bool:
        """Whether there is a checkpoint, damaged or not: without one there is nothing to lose."""
        return bool(self.checkpoints().steps())

    def is_finished(self) -> bool:
        """Whether there is the export that the end of a run writes. One from before the end may be there as well."""
        if not (self.export / "config.json").is_file():
            return False
        reached = max(self.checkpoints().steps(), default=None)
        return reached is None or reached >= self.config().schedule.steps

    def checkpoints(self, keep: int = 2, ranks: Ranks = ALONE) -> CheckpointStore:
        return CheckpointStore(self.folder / CHECKPOINTS, keep, ranks)

    def config(self) -> TrainConfig:
        """That of the newest checkpoint, or of run.json while there is none."""
        state = self.checkpoints().newest_state()
        return read_config(self.folder / CONFIG) if state is None else from_json(TrainConfig, state["config"])

    def written_config(self) -> TrainConfig:
        """That of run.json, if it is there: settings may have changed in it that do not change what is computed."""
        return read_config(self.folder / CONFIG) if (self.folder / CONFIG).is_file() else self.config()

    def metrics(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl; a last line that was cut off is left out."""
        lines = self.metrics_file.read_bytes().splitlines() if self.metrics_file.is_file() else []
        return [parse_json(line) for line in lines if step_of(line) < float("inf")]

    def recorded_tokenizer(self) -> Path | None:
        """Where the tokenizer is that the run began with; None for a run without one, or of an older version."""
        path, state = self.tokenizer.absolute(), self.checkpoints().newest_state()
        for name, entry in ({} if state is None else state.get(TOKENIZER, {})).items():
            if not (path / name).is_file() or file_entry(path / name) != entry:
                raise TrainingError(f"{path / name} is not what the run began with; restore it from a copy")
        return path if self.has_begun() and path.is_dir() else None

    def claim(self, config: TrainConfig) -> None:
        """Make the folder, or check that it is a run's, and of this configuration if anything was trained in it. Other
        processes are kept out until `release`."""
        self.mark()
        self._lock = _lock(self.folder)
        try:
            store = self.checkpoints()
            store.check_own()
            _check_unchanged(self.folder, store.newest_state(), config)
            for file in self.folder.iterdir():
                if _PARTIAL.fullmatch(file.name):  # what a killed process was writing
                    file.unlink()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def mark(self) -> None:
        """Make a folder a run's. One that holds the files of others is refused: a run's would replace some of them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / MARKER).exists() or self._is_older():
            return
        foreign = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        if foreign:
            raise TrainingError(
                f"--run-dir: {self.folder} is not a run's folder and holds {foreign[0]}; a run takes a new or empty "
                "folder"
            )
        (self.folder / MARKER).touch()

    def _is_older(self) -> bool:
        """Runs that began before there was a marker are known by their configuration."""
        with contextlib.suppress(OSError, DamagedFile):
            if read_json(self.folder / CONFIG).get(KIND) == TrainConfig.__name__:
                return True
        return self.checkpoints().newest_state() is not None

    def record(self, config: TrainConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Write down what the run is, and at its start the tokenizer: text that changes later may give another one.
        Returns the tokenizer's files with their checksums, for the checkpoints."""
        remove_leftovers(self.tokenizer)
        if tokenizer is not None and not self.has_begun():
            with new_folder(self.tokenizer, replace=True) as temporary:
                keep_tokenizer(tokenizer, temporary)
        write_config(self.folder / CONFIG, config)
        return file_entries(self.tokenizer) if self.tokenizer.is_dir() else {}


def changed_fields(before: TrainConfig, now: TrainConfig) -> list[tuple[str, Any, Any]]:
    """What differs (a.b.c, old value, new value) between two configurations and changes what is computed."""
    # What is left open and what was written out may be the same.
    old, new = (to_json(replace(one, schedule=one.schedule.resolved())) for one in (before, now))
    return [entry for entry in differences(old, new) if not _free(entry[0])]


def _check_unchanged(folder: Path, state: dict[str, Any] | None, config: TrainConfig) -> None:
    """The configuration in a checkpoint is under a checksum, and counts; run.json is for those who look on."""
    changed = [] if state is None else changed_fields(from_json(TrainConfig, state["config"]), config)
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


def step_of(line: bytes) -> float:
    """Of a line that cannot be read: infinity."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        step = None
    return step if isinstance(step, (int, float)) else float("inf")
