"""The process of a `Pool`: trains and measures the runs whose folders it reads from its standard input."""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path

from sdm.errors import UserError
from sdm.files import read_json
from sdm.reproduce.jobs import JOB, LOG, measure, read_measurements
from sdm.run import Run
from sdm.run.config import TrainConfig
from sdm.run.config_file import from_json
from sdm.signals import CONTINUES, ending_with_one_message
from sdm.training.trainer import Trainer


def run_job(folder: Path) -> None:
    """Train and measure what job.json in a folder describes; finished parts are not repeated."""
    run = Run(folder)
    if not run.is_finished():
        config = from_json(TrainConfig, read_json(folder / JOB)["config"])
        # The process that runs many jobs shows their progress.
        Trainer(replace(config, monitor=replace(config.monitor, display="none")), folder).run()
    failed = []
    for name, measurement in read_measurements(folder).items():
        try:
            measure(measurement, run, name)
        except (UserError, ImportError) as error:  # others may work
            failed.append(f"{name}: {error}")
    if failed:
        raise UserError("\n".join(failed))


def main() -> None:
    """Run jobs until standard input ends; write the exit code of each to standard output."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    folders: queue.Queue[Path] = queue.Queue()
    threading.Thread(target=_listen, args=(folders,), daemon=True).start()
    while True:
        code = _logged(folders.get())
        gc.collect()
        answers.write(b"%d\n" % code)
        if code > 128:  # a signal
            sys.exit(code)


def _listen(folders: queue.Queue[Path]) -> None:
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
