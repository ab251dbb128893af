"""How a command that trains ends before its time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from sdm import ending
from sdm.data.errors import DataError
from sdm.files import DamagedFile
from sdm.training import TrainingError, TrainingStopped


@contextlib.contextmanager
def ending_with_one_message() -> Iterator[None]:
    """As every command, and a run that was stopped with the exit code that it names."""
    mendable = (TrainingError, DataError, DamagedFile, OSError)
    with ending.ending_with_one_message(mendable, "; the same command continues"):
        try:
            yield
        except TrainingStopped as stopped:
            print(f"stopped: {stopped}", file=sys.stderr)
            raise SystemExit(stopped.exit_code) from stopped
