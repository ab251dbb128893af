"""Processes that run jobs, one after the other each: a process that has torch loaded begins the next job at once."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import IO


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


End = tuple[str, str | None]  # the name of a job, and why it failed if its log does not say


class Pool:
    """At most `size` processes. Leaving it ends all of them; runs save first."""

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
        return len(self._busy) < self._size

    def start(self, name: str, folder: Path) -> None:
        """Have the job run that a folder describes."""
        worker = self._idle.pop() if self._idle else _Worker(self._ends)
        self._busy[worker] = name
        worker.start(folder)

    def ended(self, seconds: float) -> list[End]:
        """The jobs that have ended; waits so long for one."""
        found = []
        try:
            worker, failure = self._ends.get(timeout=seconds)
            while True:
                if worker in self._busy:
                    found.append((self._busy.pop(worker), failure))
                if worker.process.poll() is None:
                    self._idle.append(worker)
                else:
                    worker.close()
                    self._idle = [one for one in self._idle if one is not worker]
                worker, failure = self._ends.get_nowait()
        except queue.Empty:
            return found


class _Worker:
    """A process that is told folders on its standard input, and says how each has ended."""

    def __init__(self, ends: queue.Queue[tuple[_Worker, str | None]]) -> None:
        # -P: the working directory is no place of modules, where a random.py would be taken for Python's.
        command = [sys.executable, "-P", "-m", "sdm.reproduce.worker"]
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
        with contextlib.suppress(BrokenPipeError):  # it has died, and `_listen` says so
            self._input.write(os.fsencode(folder.absolute()) + b"\n")
            self._input.flush()

    def close(self) -> None:
        """Wait for its end."""
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
