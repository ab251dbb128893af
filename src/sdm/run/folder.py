"""The folder of a run: one process at a time works in it, and its configuration does not change."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdm.data.tokenization import Tokenizer, keep_tokenizer
from sdm.errors import TrainingError
from sdm.files import file_entries, file_entry, new_folder, parse_json, remove_leftovers, write_bytes
from sdm.ranks import ALONE, Ranks
from sdm.run.checkpoint import CheckpointStore
from sdm.run.config import TrainConfig
from sdm.run.config_file import differences, from_json, read_config, to_json, write_config

CONFIG, CHECKPOINTS, TOKENIZER, EXPORT = "run.json", "checkpoints", "tokenizer", "export"
METRICS, FIGURES = "metrics.jsonl", "figures"
EVALUATIONS = "evaluations"
MARKER = ".sdm-run"  # says that a folder is a run's; who trains in it holds its lock
_PARTIAL = re.compile(r"\.[0-9a-f]{8}(-(run\.json|metrics\.jsonl))?")

# Fields that may change when a run is resumed: they change what is shown and kept, not what is computed.
FREE = (
    "adapt.base",
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
    """Paths and contents of a run's folder. Constructing it neither creates nor reads any file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.export = folder / EXPORT  # the model for transformers
        self.tokenizer = folder / TOKENIZER  # as it was when the run began
        self.metrics_file = folder / METRICS
        self.evaluations = folder / EVALUATIONS  # a folder for each measurement
        self.figures = folder / FIGURES
        self._lock = -1

    @classmethod
    def around(cls, path: Path) -> Run | None:
        """Return the run that a folder belongs to: as the run's folder or as its export; None if to none."""
        for run in (cls(path), cls(path.parent)):
            if run.exists() and not any(run.folder.glob("*.safetensors")):
                return run
        return None

    def exists(self) -> bool:
        """Whether the folder is a run's."""
        return (self.folder / CONFIG).is_file() or self.has_begun()

    def has_begun(self) -> bool:
        """Whether there is a checkpoint, damaged or not."""
        return bool(self.checkpoints().steps())

    def is_finished(self) -> bool:
        """Whether the last step was taken and the model exported. An unfinished run may have an older export."""
        if not (self.export / "config.json").is_file():
            return False
        reached = max(self.checkpoints().steps(), default=None)
        return reached is None or reached >= self.config().schedule.steps

    def checkpoints(self, keep: int = 2, ranks: Ranks = ALONE, pinned: int | None = None) -> CheckpointStore:
        """Return the run's checkpoints; the arguments are those of `CheckpointStore`."""
        return CheckpointStore(self.folder / CHECKPOINTS, keep, ranks, pinned)

    def config(self) -> TrainConfig:
        """Return the configuration in the newest checkpoint, or in run.json while there is none."""
        state = self.checkpoints().newest_state()
        return read_config(self.folder / CONFIG) if state is None else from_json(TrainConfig, state["config"])

    def written_config(self) -> TrainConfig:
        """Return the configuration in run.json, if it exists: it has the latest settings of what is shown and kept."""
        return read_config(self.folder / CONFIG) if (self.folder / CONFIG).is_file() else self.config()

    def metrics(self) -> list[dict[str, float]]:
        """Return the lines of metrics.jsonl without an incomplete last line."""
        lines = self.metrics_file.read_bytes().splitlines() if self.metrics_file.is_file() else []
        return [parse_json(line) for line in lines if step_of(line) < float("inf")]

    def recorded_tokenizer(self) -> Path | None:
        """Return the folder of the tokenizer that the run started with; None if it has none."""
        path, state = self.tokenizer.absolute(), self.checkpoints().newest_state()
        for name, entry in ({} if state is None else state.get(TOKENIZER, {})).items():
            if not (path / name).is_file() or file_entry(path / name) != entry:
                raise TrainingError(f"{path / name} is not what the run started with; restore it from a copy")
        return path if self.has_begun() and path.is_dir() else None

    def claim(self, config: TrainConfig) -> int | None:
        """Create the folder, or check that it is a run of this configuration, and lock it until `release`.

        Returns:
            The last step that the run may be resumed from, if its schedule was extended; otherwise None.

        Raises:
            TrainingError: another process has the folder, it is not a run's, or the configuration has changed.
        """
        self.mark()
        self._lock = _lock(self.folder)
        try:
            store = self.checkpoints()
            store.check_own()
            limit = self.check_unchanged(config)
            for file in self.folder.iterdir():
                if _PARTIAL.fullmatch(file.name):  # what a killed process was writing
                    file.unlink()
            return limit
        except BaseException:
            self.release()
            raise

    def check_unchanged(self, config: TrainConfig) -> int | None:
        """Check that the run can be resumed with a configuration.

        The configuration in a checkpoint is under a checksum, and counts; run.json is for people to read. A schedule
        with more steps is accepted if the steps already trained are the same under it. Under Warmup-Stable-Decay they
        are, up to the start of the decay: a run that has gone further is resumed from the checkpoint there.

        Returns:
            The last step that the run may be resumed from; None: any.

        Raises:
            TrainingError: the configuration has changed; the message names the fields.
        """
        store = self.checkpoints()
        state = store.newest_state()
        before = config if state is None else from_json(TrainConfig, state["config"])
        changed = changed_fields(before, config)
        if not changed:
            return None
        fields = {name for name, _, _ in changed}
        if fields <= {"schedule.steps", "schedule.decay"} and config.schedule.steps > before.schedule.steps:
            limit = min(before.schedule.decay_start, config.schedule.decay_start)
            if any(step <= limit for step in store.steps()):
                return limit
            raise TrainingError(
                f"schedule.steps: the run in {self.folder} began its decay after step {limit}, under a schedule of "
                f"{before.schedule.steps} steps, and has no checkpoint from before it: steps already trained would "
                "have had another learning rate. --init-from starts a new run from its weights"
            )
        what = "; ".join(f"{name} was {old!r} and is {new!r}" for name, old, new in changed[:5])
        raise TrainingError(
            f"the run in {self.folder} was started with another configuration: {what}. `sdm train "
            f"{self.folder.absolute()}` continues it as it was, with --extend STEPS to more steps; take another folder "
            "(--run-dir) for a new run; --init-from starts from its weights"
        )

    def branch(self, parent: Run, config: TrainConfig) -> int:
        """Begin a new run from a checkpoint of another one, as if the other had been extended in a folder of its own.

        Args:
            parent: A run of the same configuration with fewer steps.
            config: The configuration of this run, which continues all steps of the parent before its decay.

        Returns:
            The step that this run begins from.

        Raises:
            TrainingError: This run has begun, or the parent has no checkpoint that this configuration can continue.
        """
        if self.has_begun():
            raise TrainingError(f"the run in {self.folder} has begun; only a new one can branch off another")
        limit = parent.check_unchanged(config)
        store = parent.checkpoints()
        steps = [step for step in store.steps() if limit is None or step <= limit]
        if not steps:
            raise TrainingError(f"the run in {parent.folder} has no checkpoint to begin from")
        self.mark()
        if parent.tokenizer.is_dir():
            with new_folder(self.tokenizer, replace=True) as temporary:
                shutil.copytree(parent.tokenizer, temporary, dirs_exist_ok=True)
        lines = parent.metrics_file.read_bytes().splitlines(keepends=True) if parent.metrics_file.is_file() else []
        write_bytes(self.metrics_file, b"".join(line for line in lines if step_of(line) <= steps[-1]))
        with new_folder(self.checkpoints().path(steps[-1])) as temporary:
            shutil.copytree(store.path(steps[-1]), temporary, dirs_exist_ok=True)
        return steps[-1]

    def release(self) -> None:
        """Let other processes claim the folder."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def mark(self) -> None:
        """Create the folder and mark it as a run's. A folder with other files is refused: a run could replace them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / MARKER).exists():
            return
        foreign = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        if foreign:
            raise TrainingError(
                f"--run-dir: {self.folder} is not a run's folder and holds {foreign[0]}; a run takes a new or empty "
                "folder"
            )
        (self.folder / MARKER).touch()

    def record(self, config: TrainConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Write run.json and, at the start of a run, the tokenizer: text that changes later may give another one.

        Returns:
            The tokenizer's files with their checksums, for the checkpoints.
        """
        remove_leftovers(self.tokenizer)
        if tokenizer is not None and not self.has_begun():
            with new_folder(self.tokenizer, replace=True) as temporary:
                keep_tokenizer(tokenizer, temporary)
        write_config(self.folder / CONFIG, config)
        return file_entries(self.tokenizer) if self.tokenizer.is_dir() else {}


def changed_fields(before: TrainConfig, now: TrainConfig) -> list[tuple[str, Any, Any]]:
    """Return the fields (a.b.c, old value, new value) in which two configurations differ and which change results."""
    # A default and the same value written out do not differ.
    old, new = (to_json(replace(config, schedule=config.schedule.resolved())) for config in (before, now))
    return [entry for entry in differences(old, new) if not _free(entry[0])]


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
    """Return the step of a line of metrics.jsonl; infinity if the line cannot be read."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        step = None
    return step if isinstance(step, (int, float)) else float("inf")
