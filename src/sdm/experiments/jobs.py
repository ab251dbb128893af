"""Several runs side by side: each in a process of its own, with one thread, followed through its metrics."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdm.data.errors import DataError
from sdm.ending import CONTINUES, ending_with_one_message
from sdm.files import CHECKSUM, DamagedFile, read_checked_json, read_json, write_checked_json, write_json
from sdm.run import Run
from sdm.run.config_file import from_json, to_json
from sdm.training import TrainConfig, TrainingError

JOB, LOG = "job.json", "log.txt"
_MEASUREMENTS = {"language": "position"}  # as older versions called them


@dataclass(frozen=True)
class Job:
    """A run and what to measure after it."""

    name: str
    config: TrainConfig
    measure: str  # of evaluation.registry


class JobFailed(TrainingError):
    """A run did not end well; the message is its own."""


def run_jobs(
    jobs: list[Job], folder: Path, processes: int, progress: Callable[[dict[str, dict[str, float]]], None]
) -> dict[str, dict[str, Any]]:
    """Run all jobs, `processes` at a time. Those that have a result already are left alone: an interrupted reproduction
    goes on where it was. What another description left is removed. `progress` is told the newest metrics of every job
    that has begun."""
    for job in jobs:
        _remove_other(job, folder / job.name)
    waiting = [job for job in jobs if _result(folder / job.name) is None]
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job = waiting.pop(0)
                running[job.name] = _start(job, folder / job.name)
            time.sleep(0.5)
            progress({job.name: (Run(folder / job.name).metrics() or [{}])[-1] for job in jobs if job not in waiting})
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if running.pop(name).returncode != 0:
                    raise JobFailed(f"{name} failed:\n{_tail(folder / name / LOG)}")
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)  # a run saves first
        for process in running.values():
            process.wait()
    results = {job.name: _result(folder / job.name) for job in jobs}
    return {name: result for name, result in results.items() if result is not None}


def _start(job: Job, folder: Path) -> subprocess.Popen[bytes]:
    Run(folder).mark()
    write_json(folder / JOB, _description(job))
    # -P: the working directory is no place of modules, where a random.py would be taken for Python's.
    command = [sys.executable, "-P", "-m", "sdm.experiments.jobs", str(folder)]
    with (folder / LOG).open("ab") as log:
        # In a session of its own: Ctrl-C would reach it twice, and a second signal ends a run before it has saved.
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _description(job: Job) -> dict[str, Any]:
    return {"name": job.name, "config": to_json(job.config), "measure": job.measure}


def _result(folder: Path) -> dict[str, Any] | None:
    """What was measured; None if there is no result, or a damaged one, which is measured again."""
    try:
        path = Run(folder).results
        result = read_json(path)
        # Those of older versions have no checksum.
        return read_checked_json(path) if CHECKSUM in result else result
    except (FileNotFoundError, DamagedFile):
        return None


def _remove_other(job: Job, folder: Path) -> None:
    """A run that another job of this name left can neither be continued nor give its result to this one."""
    file = folder / JOB
    try:
        if file.is_file() and _as_written_now(read_json(file)) != _description(job):
            shutil.rmtree(folder)
    except DamagedFile as error:
        raise JobFailed(f"{error}; delete it to continue the run, or {folder} to start it anew") from error


def _as_written_now(description: dict[str, Any]) -> dict[str, Any]:
    """A description with the names and the fields that it would have today; unchanged if it cannot be read."""
    try:
        measure = description.get("measure")
        config = to_json(from_json(TrainConfig, description.get("config")))
        return description | {"config": config, "measure": _MEASUREMENTS.get(str(measure), measure)}
    except (TrainingError, DataError):
        return description


def _tail(path: Path, lines: int = 12) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def main(folder: Path) -> None:
    """What the process of one job does: train and measure the run that job.json in the folder describes."""
    from sdm.experiments.measure import measure_run
    from sdm.training import Trainer

    with ending_with_one_message(CONTINUES):
        description = _as_written_now(read_json(folder / JOB))
        config = from_json(TrainConfig, description["config"])
        Trainer(config, folder).run()
        result = measure_run(description["measure"], Run(folder))
        write_checked_json(Run(folder).results, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
