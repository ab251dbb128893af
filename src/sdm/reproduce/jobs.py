"""Many runs side by side: what a job is, and running all of them.

A job is a run's folder with two files more: job.json, what is to be trained and measured, and evaluation.json, what has
been measured. Nothing that is done is done again: neither training, which only another `TrainConfig` makes void, nor
a measurement, which only other settings do. A job that fails does not stop the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdm.data.errors import DataError
from sdm.errors import UserError
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.results import Results, read_results
from sdm.evaluation.runner import settings_of
from sdm.files import CHECKSUM, DamagedFile, read_checked_json, read_json, write_json
from sdm.reproduce.measure import FACTS, kind_of, measurement_of, older_measurement
from sdm.reproduce.pool import Pool
from sdm.run import Run
from sdm.run.config import TrainConfig
from sdm.run.config_file import from_json, to_json
from sdm.run.errors import TrainingError
from sdm.run.folder import changed_fields

JOB, LOG = "job.json", "log.txt"
LOG_LINES = 12
SMALLEST_DISK = 2**22  # bytes: a disk that has less left is full


@dataclass(frozen=True)
class Job:
    """A run and what to measure after it."""

    name: str
    """Of its folder."""
    config: TrainConfig
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    """By a name of the job's own: the results are in evaluations/NAME of the run's folder."""
    work: float = 1.0
    """How long it takes, in any unit: the longest begin first, and the time that is left is estimated by it."""


@dataclass(frozen=True)
class Outcome:
    """What came of a job."""

    folder: Path
    facts: dict[str, Any] | None = None
    """Of a run that is trained: `sdm.reproduce.measure.facts_of`."""
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The summary of each measurement, by its name in the job."""
    failure: str | None = None
    """The end of the log of a job that failed. What it has measured before that is there nevertheless."""

    def results(self, name: str) -> Results:
        """All that a measurement has kept, unit by unit."""
        return read_results(Run(self.folder).evaluations / name)


@dataclass(frozen=True)
class Standing:
    """How far a job is."""

    state: str
    """"waiting", "running", "done" or "failed"."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest."""
    seconds: float = 0.0
    """That it has taken in this session."""
    first_step: float = 0.0
    """Where this session began."""


class JobFailed(TrainingError):
    """Something about the folder of a job is wrong; the message says what to do."""


Progress = Callable[[Mapping[str, Standing]], None]


def run_jobs(
    jobs: Sequence[Job], folder: Path, processes: int, progress: Progress = lambda standings: None
) -> dict[str, Outcome]:
    """Run all jobs, `processes` at a time, one thread each; an interrupted call goes on where it was.

    A job that fails has an outcome that says why, and the next call tries it again. Raises where going on makes no
    sense: a folder that is no job's, a disk that is full.
    """
    if len({job.name for job in jobs}) < len(jobs):
        raise ValueError("two jobs have the same name")
    for job in jobs:
        _remove_other(job, folder / job.name)
    outcomes = {job.name: read_outcome(job, folder / job.name) for job in jobs}
    waiting = sorted((job for job in jobs if not _is_done(job, outcomes[job.name])), key=lambda job: -job.work)
    states = {job.name: Standing("waiting" if job in waiting else "done") for job in jobs}
    begun: dict[str, tuple[Job, float, int]] = {}  # when, and how long its log was
    with Pool(min(processes, len(waiting))) as pool:
        while waiting or begun:
            while waiting and pool.is_free():
                job = waiting.pop(0)
                begun[job.name] = (job, time.monotonic(), _describe(job, folder / job.name))
                step = _newest(folder / job.name).get("step", 0.0)
                states[job.name] = Standing("running", first_step=step)
                pool.start(job.name, folder / job.name)
            for name, failure in pool.ended(0.5):
                job, start, offset = begun.pop(name)
                found = read_outcome(job, folder / name)
                if failure is not None:
                    tail = _tail(folder / name / LOG, offset) or failure
                    _check_disk(folder, tail)
                    found = Outcome(found.folder, found.facts, found.measured, tail)
                outcomes[name] = found
                states[name] = _standing(states[name], "done" if failure is None else "failed", folder / name, start)
            for name, (_, start, _) in begun.items():
                states[name] = _standing(states[name], "running", folder / name, start)
            progress(states)
    return outcomes


def read_outcome(job: Job, folder: Path) -> Outcome:
    """What has been measured so far, with the settings that the job has."""
    try:
        path = Run(folder).results
        content = read_json(path)
        # Those of older versions have no checksum, and are of one measurement.
        content = read_checked_json(path) if CHECKSUM in content else content
        content = content if "measured" in content else _as_written_now(content, folder)
    except (FileNotFoundError, NotADirectoryError, DamagedFile):
        return Outcome(folder)
    measured = {}
    for name, wanted in job.measurements.items():
        kept = content["measured"].get(name)
        if kept is not None and _is_same(kept["measurement"], wanted):
            measured[name] = kept["summary"]
    return Outcome(folder, content["facts"], measured)


def _is_done(job: Job, found: Outcome) -> bool:
    return found.facts is not None and found.measured.keys() == job.measurements.keys()


def _is_same(kept: dict[str, Any], wanted: Measurement) -> bool:
    with contextlib.suppress(UserError, DataError):
        before = measurement_of(kept)
        return type(before) is type(wanted) and settings_of(before) == settings_of(wanted)
    return False


def _as_written_now(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A result of older versions, which had one measurement, side by side with what was known of the run."""
    name, measurement = older_measurement(str(read_json(folder / JOB).get("measure")))
    summary = {key: value for key, value in content.items() if key not in FACTS}
    return {
        "facts": {key: value for key, value in content.items() if key in FACTS},
        "measured": {name: {"measurement": describe(measurement), "summary": summary}},
    }


def describe(measurement: Measurement) -> dict[str, Any]:
    """As JSON, with the name by which it is found again."""
    return {"name": kind_of(measurement), "settings": to_json(measurement)}


def _describe(job: Job, folder: Path) -> int:
    """Write what the process of the job is to do. Returns how long its log is."""
    Run(folder).mark()
    measurements = {name: describe(measurement) for name, measurement in job.measurements.items()}
    write_json(folder / JOB, {"name": job.name, "config": to_json(job.config), "measurements": measurements})
    log = folder / LOG
    return log.stat().st_size if log.is_file() else 0


def _remove_other(job: Job, folder: Path) -> None:
    """A run of another configuration can neither be continued nor give its result to this job."""
    if not (folder / JOB).is_file():
        return
    try:
        description = read_json(folder / JOB)
    except DamagedFile as error:
        raise JobFailed(f"{error}; delete it to continue the run, or {folder} to start it anew") from error
    try:
        changed = bool(changed_fields(from_json(TrainConfig, description.get("config")), job.config))
    except (TrainingError, UserError, DataError):
        changed = True
    if changed:
        shutil.rmtree(folder)


def _newest(folder: Path) -> Mapping[str, float]:
    return (Run(folder).metrics() or [{}])[-1]


def _standing(before: Standing, state: str, folder: Path, start: float) -> Standing:
    return Standing(state, _newest(folder), time.monotonic() - start, before.first_step)


def _tail(path: Path, offset: int) -> str:
    """The last lines that were written after `offset`."""
    with contextlib.suppress(OSError):
        lines = path.read_bytes()[offset:].decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])
    return ""


def _check_disk(folder: Path, failure: str) -> None:
    """Raise if a job has failed for want of room: those that follow would fail as well, and so would the report."""
    # What could not be written whole is removed, so that there may be room again.
    if os.strerror(errno.ENOSPC) in failure or shutil.disk_usage(folder).free < SMALLEST_DISK:
        raise UserError(f"the disk of {folder} is full; make room, and the same command continues")
