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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from sdm.signals import CONTINUES, ending_with_one_message

LOG = "log.txt"
LOG_LINES = 12  # of a log's end that say why a job failed
SIGNALS = 128  # a process that a signal ends has an exit code above


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
            [sys.executable, "-P", "-m", "sdm.reproduce.pool"],
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
    from sdm.reproduce.jobs import run_job  # which starts this pool

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
