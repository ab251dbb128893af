"""How a command ends before its time: with one message, an exit code and nothing half done left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from sdm.data.errors import DataError
from sdm.training import TrainingError, TrainingStopped

# Not all systems have SIGHUP, which says that the terminal was closed.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]


class Interrupted(KeyboardInterrupt):
    """A signal came. Unlike the signal itself it passes through every `finally`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextlib.contextmanager
def ending_with_one_message() -> Iterator[None]:
    """What a user can mend or has asked for ends the process without a traceback; SDM_TRACEBACK=1 shows errors'."""
    try:
        with _signals_raise():
            yield
    except (TrainingError, DataError, OSError) as error:
        if os.environ.get("SDM_TRACEBACK") == "1":
            raise
        raise SystemExit(f"error: {error}") from error
    except TrainingStopped as stopped:
        print(f"stopped: {stopped}", file=sys.stderr)
        raise SystemExit(stopped.exit_code) from stopped
    except Interrupted as interrupted:
        print(f"stopped: {interrupted}; the same command continues", file=sys.stderr)
        raise SystemExit(interrupted.exit_code) from interrupted


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """The first signal raises; those that follow are ignored, so that what it ends can be cleared up."""
    # Only the main thread may set handlers, and what is ignored, as by nohup, stays so.
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS if main}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def stop(number: int, frame: FrameType | None) -> None:
        for known in handled:
            signal.signal(known, signal.SIG_IGN)
        raise Interrupted(number)

    try:
        for number in handled:
            signal.signal(number, stop)
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
