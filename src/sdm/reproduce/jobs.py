"""Jobs: runs that are trained and measured side by side.

A job is a run's folder with job.json, which says what is to be trained and measured. Its results are those of the run:
evaluations/NAME/results.json for each measurement. Finished parts are not repeated: another `TrainConfig` makes the
training void, other settings a measurement. A job that fails does not stop the others.

Jobs run in processes of their own, each of which loads torch once and runs one job after the other: `main` reads
folders from its standard input, and trains and measures their runs.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sdm.data.config import CorpusConfig, RetrievalConfig, open_data
from sdm.data.corpus import open_corpus
from sdm.errors import DataError, TrainingError, UserError
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.measurement import Measurement, evaluate, settings_of
from sdm.evaluation.registry import MEASUREMENTS, find
from sdm.evaluation.results import FILE, Results, read_results
from sdm.files import DamagedFile, locked, read_json, remove_folder, write_json
from sdm.models import cost
from sdm.models.saved_folder import read_shapes
from sdm.run import Run
from sdm.run.config import TrainConfig
from sdm.run.config_file import from_json, to_json
from sdm.run.folder import changed_fields
from sdm.run.model import SavedModel
from sdm.signals import CONTINUES, ending_with_one_message

JOB, LOG, REPLACED = "job.json", "log.txt", "replaced"
LOG_LINES = 12  # of a log's end that say why a job failed
SIGNALS = 128  # a process that a signal ends has an exit code above
SMALLEST_DISK = 2**22  # bytes: a disk that has less left is full
NAMES = {kind: name for name, kind in MEASUREMENTS.items()}
OVERHEAD = 500_000  # FLOPs that could be computed while a token's small matrices are fetched and its loops are run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A run and what to measure after it."""

    name: str
    """Name of its folder."""
    config: TrainConfig
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    """By name: the results are in evaluations/NAME of the run's folder."""
    work: float = 1.0
    """Expected duration in any unit: long jobs start first, and the remaining time is estimated by it."""
    extends: str | None = None
    """Another job with the same configuration but fewer steps: this one begins from its checkpoint before the decay."""


@dataclass(frozen=True)
class RunFacts:
    """Size and course of a trained run."""

    parameters: int
    """Without the learned initial state M0."""
    initial_state_parameters: int
    """Numbers of M0."""
    state_elements: int
    """Numbers of the recurrent state, or of the keys and values behind one training sequence; 0: not counted."""
    flops_per_token: int
    """Of a forward pass at the training length."""
    steps: int
    lr: float
    seconds: float
    """Training time."""
    valid_loss: float | None


@dataclass(frozen=True)
class Outcome:
    """Results of a job."""

    folder: Path
    facts: RunFacts | None = None
    """None until the run is trained."""
    results: Mapping[str, Results] = field(default_factory=dict)
    """Complete results of the job's measurements, by name."""
    failure: str | None = None
    """The end of the log, if the job failed. Results from before the failure are kept."""

    def has(self, measurements: Iterable[str]) -> bool:
        """Whether the run is trained and has results of these measurements."""
        return self.facts is not None and all(name in self.results for name in measurements)

    @property
    def measured(self) -> dict[str, dict[str, Any]]:
        """The summary of each measurement, by name."""
        return {name: results.summary or {} for name, results in self.results.items()}


@dataclass(frozen=True)
class JobStatus:
    """Progress of a job."""

    state: str
    """"waiting", "running", "done" or "failed"."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest line of metrics."""
    seconds: float = 0.0
    """Time that the job has taken in this process."""
    first_step: float = 0.0
    """The step at which this process started the job."""


Progress = Callable[[Mapping[str, JobStatus]], None]


@contextlib.contextmanager
def study_lock(folder: Path) -> Iterator[None]:
    """Create a folder and keep other processes from running jobs in it. The lock ends with the process.

    Raises:
        UserError: If another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder) as free:
        if not free and os.name == "posix":
            raise UserError(
                f"another `sdm reproduce` is working in {folder}; wait for it to end, or take another folder (--output)"
            )
        yield


def run_jobs(
    jobs: Sequence[Job], folder: Path, processes: int, progress: Progress = lambda statuses: None
) -> dict[str, Outcome]:
    """Run all jobs that are not done, `processes` at a time with one thread each.

    Returns:
        The outcome of every job. A job that failed says why; the next call tries it again.

    Raises:
        UserError: If a folder cannot be used or the disk is full.
    """
    if len({job.name for job in jobs}) < len(jobs):
        raise ValueError("two jobs have the same name")
    for job in jobs:
        _make_room(job, folder / job.name)
    outcomes = {job.name: read_outcome(job, folder / job.name) for job in jobs}
    done = {job.name for job in jobs if outcomes[job.name].has(job.measurements)}
    waiting = sorted((job for job in jobs if job.name not in done), key=lambda job: -job.work)
    statuses = {job.name: JobStatus("waiting" if job in waiting else "done") for job in jobs}
    running: dict[Future[str | None], tuple[Job, float]] = {}  # with the time at which it started
    with Pool(min(processes, len(waiting))) as pool:
        while waiting or running:
            while len(running) < processes and (ready := _next(waiting, [job for job, _ in running.values()])):
                waiting.remove(ready)
                _branch(ready, folder)
                _describe(ready, folder / ready.name)
                statuses[ready.name] = JobStatus("running", first_step=_newest(folder / ready.name).get("step", 0.0))
                running[pool.start(folder / ready.name)] = (ready, time.monotonic())
            ended, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for end, (job, start) in list(running.items()):
                state = "running"
                if end in ended:
                    del running[end]
                    outcomes[job.name] = _outcome(job, folder / job.name, end.result())
                    state = "done" if outcomes[job.name].failure is None else "failed"
                metrics, seconds = _newest(folder / job.name), time.monotonic() - start
                statuses[job.name] = JobStatus(state, metrics, seconds, statuses[job.name].first_step)
            progress(statuses)
    return outcomes


def _next(waiting: Sequence[Job], running: Sequence[Job]) -> Job | None:
    """The first job that does not wait for another one."""
    pending = {job.name for job in (*waiting, *running)}
    return next((job for job in waiting if job.extends not in pending), None)


def _outcome(job: Job, folder: Path, failure: str | None) -> Outcome:
    """The outcome of a job that has ended.

    Raises:
        UserError: If the disk is full: the other jobs and the report would fail as well.
    """
    # Incomplete files are removed, so that there may be room again.
    if failure and (os.strerror(errno.ENOSPC) in failure or shutil.disk_usage(folder).free < SMALLEST_DISK):
        raise UserError(f"the disk of {folder.parent} is full; make room, and the same command continues")
    return replace(read_outcome(job, folder), failure=failure)


def _branch(job: Job, folder: Path) -> None:
    """Give a job that has not begun the checkpoint of the one that it extends, if there is one to begin from."""
    if job.extends is None or Run(folder / job.name).has_begun():
        return
    try:
        Run(folder / job.name).branch(Run(folder / job.extends), job.config)
    except (OSError, UserError, TrainingError) as error:
        log.warning("%s is trained from the start, not from %s: %s", job.name, job.extends, error)


def read_outcome(job: Job, folder: Path) -> Outcome:
    """Read what a job has trained and measured so far; results of other settings are left out."""
    run = Run(folder)
    try:
        if not run.is_finished():
            return Outcome(folder)
        facts = run_facts(run)
    except (OSError, UserError, TrainingError):  # the job's own process says what is wrong
        return Outcome(folder)
    measured = {}
    for name, measurement in job.measurements.items():
        with contextlib.suppress(OSError, UserError):  # the same
            results = stored_results(measurement, run.evaluations / name)
            if results is not None and results.complete and results.summary is not None:
                measured[name] = results
    return Outcome(folder, facts, measured)


def run_job(folder: Path) -> None:
    """Train and measure what job.json in a folder describes; finished parts are not repeated."""
    from sdm.training.trainer import Trainer  # the process that starts jobs does not train

    run, description = Run(folder), read_json(folder / JOB)
    if not run.is_finished():
        config = from_json(TrainConfig, description["config"])
        # The process that runs many jobs shows their progress.
        Trainer(replace(config, monitor=replace(config.monitor, display="none")), folder).run()
    failed = []
    for name, asked in description["measurements"].items():
        try:
            measure(from_json(find(asked["name"]), asked["settings"], "settings"), run, name)
        except (UserError, ImportError) as error:  # others may work
            failed.append(f"{name}: {error}")
    if failed:
        raise UserError("\n".join(failed))


def measure(measurement: Measurement, run: Run, name: str) -> None:
    """Measure a run into evaluations/NAME. Finished units are not measured again, unless the settings differ."""
    folder = run.evaluations / name
    try:
        results = stored_results(measurement, folder)
        if results is not None and results.complete:
            return
        if results is None and folder.is_dir():
            remove_folder(folder)
    except DamagedFile:
        move_aside(folder, run.folder)
    evaluate(NAMES[type(measurement)], measurement, [(open_model(run.folder), folder)])


def stored_results(measurement: Measurement, folder: Path) -> Results | None:
    """Results in a folder, complete or not; None if there are none or if they are of other settings."""
    if not (folder / FILE).is_file():
        return None
    results = read_results(folder)
    same = results.measurement == NAMES[type(measurement)] and results.settings == settings_of(measurement)
    return results if same else None


def run_facts(run: Run) -> RunFacts:
    """Size and course of a finished run."""
    config, metrics = run.config(), run.metrics()
    course: dict[str, Any] = {
        "steps": config.schedule.steps,
        "lr": config.optim.lr,
        "seconds": metrics[-1]["seconds"] if metrics else 0.0,
        "valid_loss": metrics[-1].get("valid/loss") if metrics else None,
    }
    if config.adapt is not None:
        sizes = {name: math.prod(shape) for name, shape in read_shapes(run.export).items()}
        initial = sum(size for name, size in sizes.items() if name.endswith("initial_state"))
        total = sum(sizes.values()) - initial
        return RunFacts(total, initial, 0, 2 * total, **course)
    costs, context = cost(SavedModel(run.folder).config()), config.data_sizes()[0]
    return RunFacts(
        parameters=costs.parameters,
        initial_state_parameters=costs.initial_state_parameters,
        state_elements=costs.state_elements or costs.kv_elements_per_token * context,
        flops_per_token=costs.training_flops_per_token(context) // 3,
        **course,
    )


def expected_work(config: TrainConfig) -> float:
    """Estimate the duration of a run in FLOPs, without opening text: only the ratio of two runs matters."""
    length, vocabulary = config.data_sizes()
    per_token = 4 * OVERHEAD  # of a pretrained model, whose size is known when it is loaded
    if config.adapt is None:
        per_token = cost(config.model.build(vocabulary)).training_flops_per_token(length) + OVERHEAD
    return float(config.schedule.steps * config.data.batch_size * length * per_token)


def prepare_corpora(jobs: Sequence[Job]) -> None:
    """Tokenise the text of all jobs once, before several processes would do so at the same time."""
    for config in {job.config.data for job in jobs if isinstance(job.config.data, CorpusConfig)}:
        for split in ("train", "valid", "test"):
            open_corpus(config, split)
    tasks = [job.config.data for job in jobs if isinstance(job.config.data, RetrievalConfig)]
    for task in {replace(config, seed=0) for config in tasks}:  # which trains its tokenizer
        open_data(task, "valid")


def _describe(job: Job, folder: Path) -> None:
    """Write job.json."""
    Run(folder).mark()
    measurements = {
        name: {"name": NAMES[type(measurement)], "settings": to_json(measurement)}
        for name, measurement in job.measurements.items()
    }
    write_json(folder / JOB, {"name": job.name, "config": to_json(job.config), "measurements": measurements})


def _make_room(job: Job, folder: Path) -> None:
    """Move a run aside that is not this job's: of another configuration, or of one that cannot be read."""
    if not (folder / JOB).is_file():
        return
    try:
        description = read_json(folder / JOB)
    except DamagedFile as error:
        raise UserError(f"{error}; delete it to continue the run, or move {folder} away to start it anew") from error
    try:
        if not changed_fields(from_json(TrainConfig, description.get("config")), job.config):
            return
        reason = "has another configuration"
    except (TrainingError, UserError, DataError) as error:
        reason = f"has a {JOB} that cannot be read ({error})"
    log.warning("the run in %s %s; it is kept as %s", folder, reason, move_aside(folder, folder.parent))


def move_aside(folder: Path, parent: Path) -> Path:
    """Move a folder to PARENT/replaced/NAME-1, or the next number that is free. Returns where it is."""
    (parent / REPLACED).mkdir(exist_ok=True)
    number = 1
    while (kept := parent / REPLACED / f"{folder.name}-{number}").exists():
        number += 1
    return folder.rename(kept)


def _newest(folder: Path) -> Mapping[str, float]:
    return (Run(folder).metrics() or [{}])[-1]


class Pool(contextlib.AbstractContextManager["Pool"]):
    """Processes that run jobs, each served by a thread. Leaving the context stops all of them; runs save first."""

    def __init__(self, size: int) -> None:
        self._threads = ThreadPoolExecutor(max(size, 1))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: list[subprocess.Popen[bytes]] = []

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        self._threads.shutdown()
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                process.communicate()

    def start(self, folder: Path) -> Future[str | None]:
        """Start the job that a folder describes. The result is None, or the end of its log if it failed."""
        self._idle = [process for process in self._idle if process.poll() is None]
        process = self._idle.pop() if self._idle else self._new_process()
        return self._threads.submit(self._run, process, folder)

    def _new_process(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            # -P: modules are not imported from the working directory, where a random.py would shadow Python's.
            [sys.executable, "-P", "-m", "sdm.reproduce.jobs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            # In a session of its own: Ctrl-C would reach it twice, and a second signal ends a run before it has saved.
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def _run(self, process: subprocess.Popen[bytes], folder: Path) -> str | None:
        """Write a folder to a process, and wait for the exit code of its job. Returns why it failed."""
        assert process.stdin is not None
        assert process.stdout is not None
        log = folder / LOG
        before = log.stat().st_size if log.is_file() else 0
        with contextlib.suppress(BrokenPipeError):  # the process has died
            process.stdin.write(os.fsencode(folder.absolute()) + b"\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        code = int(answer) if answer else process.wait()
        if answer and code <= SIGNALS:
            self._idle.append(process)
        if answer and code == 0:
            return None
        with contextlib.suppress(OSError):
            lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
            if any(lines):
                return "\n".join(lines[-LOG_LINES:])
        ended = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        return f"its process {ended}{' (out of memory?)' if code == -signal.SIGKILL else ''}"


def main() -> None:
    """Run jobs until standard input ends; write the exit code of each to standard output."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    folders: queue.Queue[Path] = queue.Queue()
    threading.Thread(target=_read_folders, args=(folders,), daemon=True).start()
    while True:
        code = _logged(folders.get())
        gc.collect()
        answers.write(b"%d\n" % code)
        if code > SIGNALS:
            sys.exit(code)


def _read_folders(folders: queue.Queue[Path]) -> None:
    """Read folders until the parent process has ended, however it ended; then stop this process, which saves first."""
    for line in sys.stdin.buffer:
        folders.put(Path(os.fsdecode(line.removesuffix(b"\n"))))
    os.kill(os.getpid(), signal.SIGTERM)


def _logged(folder: Path) -> int:
    """Run a job with its output going to its log. Returns an exit code."""
    with (folder / LOG).open("ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    try:
        with ending_with_one_message(CONTINUES):
            run_job(folder)
        return 0
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        print(end.code, file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()
    return 1


if __name__ == "__main__":
    main()
