"""A pool of processes that run jobs. Each process loads torch once and runs one job after the other.

`main` is what such a process runs: it reads folders from its standard input and trains and measures their runs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import IO

from sdm.signals import CONTINUES, ending_with_one_message


def processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


JobEnd = tuple[str, str | None]  # the name of a job, and why it failed if its log does not say


class Pool:
    """At most `size` processes. Leaving the context stops all of them; runs save first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ends: queue.Queue[tuple[_Worker, str | None]] = queue.Queue()
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, str] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        workers = (*self._busy, *self._idle)
        for worker in workers:
            worker.process.send_signal(signal.SIGTERM)
        for worker in workers:
            worker.close()

    def is_free(self) -> bool:
        """Whether another job can start."""
        return len(self._busy) < self._size

    def start(self, name: str, folder: Path) -> None:
        """Start the job that a folder describes."""
        worker = self._idle.pop() if self._idle else _Worker(self._ends)
        self._busy[worker] = name
        worker.start(folder)

    def ended(self, seconds: float) -> list[JobEnd]:
        """Return the jobs that have ended; wait at most `seconds` for the first."""
        ends: list[JobEnd] = []
        try:
            worker, failure = self._ends.get(timeout=seconds)
            while True:
                if worker in self._busy:
                    ends.append((self._busy.pop(worker), failure))
                if worker.process.poll() is None:
                    self._idle.append(worker)
                else:
                    worker.close()
                    self._idle = [idle for idle in self._idle if idle is not worker]
                worker, failure = self._ends.get_nowait()
        except queue.Empty:
            return ends


class _Worker:
    """A process that reads folders from its standard input and writes the exit code of each job."""

    def __init__(self, ends: queue.Queue[tuple[_Worker, str | None]]) -> None:
        # -P: modules are not imported from the working directory, where a random.py would shadow Python's.
        command = [sys.executable, "-P", "-m", "sdm.reproduce.pool"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            # In a session of its own: Ctrl-C would reach it twice, and a second signal ends a run before it has saved.
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input = self.process.stdin
        self._listener = threading.Thread(target=self._listen, args=(self.process.stdout, ends), daemon=True)
        self._listener.start()

    def start(self, folder: Path) -> None:
        """Start the job of a folder."""
        with contextlib.suppress(BrokenPipeError):  # the process has died, and `_listen` reports it
            self._input.write(os.fsencode(folder.absolute()) + b"\n")
            self._input.flush()

    def close(self) -> None:
        """Wait for the process to end."""
        self._listener.join()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def _listen(self, output: IO[bytes], ends: queue.Queue[tuple[_Worker, str | None]]) -> None:
        with output:
            for line in output:
                code = int(line)
                ends.put((self, None if code == 0 else f"it ended with exit code {code} and said nothing"))
        ends.put((self, f"its process {_ended(self.process.wait())}"))


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def main() -> None:
    """Run jobs until standard input ends; write the exit code of each to standard output."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    folders: queue.Queue[Path] = queue.Queue()
    threading.Thread(target=_read_folders, args=(folders,), daemon=True).start()
    while True:
        code = _logged(folders.get())
        gc.collect()
        answers.write(b"%d\n" % code)
        if code > 128:  # a signal
            sys.exit(code)


def _read_folders(folders: queue.Queue[Path]) -> None:
    """Read folders until the parent process has ended, however it ended; then stop this process, which saves first."""
    for line in sys.stdin.buffer:
        folders.put(Path(os.fsdecode(line.removesuffix(b"\n"))))
    os.kill(os.getpid(), signal.SIGTERM)


def _logged(folder: Path) -> int:
    """Run a job with its output going to its log. Returns an exit code."""
    from sdm.reproduce.jobs import LOG, run_job  # which starts this pool

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
