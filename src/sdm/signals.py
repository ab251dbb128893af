"""How a command ends before its time: with one message, an exit code and nothing half done left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TextIO

from sdm.errors import RankError, UserError

# Not all systems have SIGHUP, which says that the terminal was closed.
HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
SIGNALS = [signal.SIGTERM, signal.SIGINT] + ([] if HANGUP is None else [HANGUP])

CONTINUES = "; the same command continues"


class Interrupted(KeyboardInterrupt):
    """A signal came. Unlike the signal itself it passes through every `finally`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Stopped(RuntimeError):
    """Work ended before its time; the message says why, and where it continues from."""

    of_all = False
    """Whether all processes of a job end so: then the first one says it."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextlib.contextmanager
def ending_with_one_message(advice: str = "") -> Iterator[None]:
    """Errors that a user can mend, signals and stops end the process without a traceback; SDM_TRACEBACK=1 shows
    errors'. `advice` follows what is said of a signal."""
    try:
        with _signals_raise():
            yield
    except (UserError, OSError) as error:
        if os.environ.get("SDM_TRACEBACK") == "1":
            raise
        if isinstance(error, RankError) and _rank():
            raise SystemExit(1) from error  # the rank that has failed says so, and the first one
        raise SystemExit(f"{_speaker()}error: {error}") from error
    except Interrupted as interrupted:
        if not _rank():
            _say(f"stopped: {interrupted}{advice}")
        raise SystemExit(interrupted.exit_code) from interrupted
    except Stopped as stopped:
        if not (stopped.of_all and _rank()):
            _say(f"{_speaker()}stopped: {stopped}")
        raise SystemExit(stopped.exit_code) from stopped
    finally:
        _settle()


def silence(stream: TextIO) -> None:
    """Whoever read a stream has gone (`| head`, a closed terminal, a log on a full disk): let what is still buffered go
    nowhere. The interpreter would fail over it at its end and lose the exit code."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a notebook's stream is no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _speaker() -> str:
    return f"rank {_rank()}: " if _rank() else ""


def _say(text: str) -> None:
    """A line on standard error, if anybody can have it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def _settle() -> None:
    """Write what is buffered for standard output, or forget it."""
    try:
        sys.stdout.flush()
    except OSError:
        silence(sys.stdout)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """The first signal raises; those that follow are ignored, so that what it ends can be cleared up."""

    def stop(number: int, frame: FrameType | None) -> None:
        for known in handled:
            signal.signal(known, signal.SIG_IGN)
        raise Interrupted(number)

    with _handling(stop) as handled:
        yield


class PostponedSignals:
    """While it is entered, the first signal is only remembered in `received`, and announced by its name; a second one
    ends the process at once."""

    def __init__(self, announce: Callable[[str], None] = lambda name: None) -> None:
        self.received: Interrupted | None = None
        self._announce, self._handling = announce, _handling(self._remember)

    def __enter__(self) -> PostponedSignals:
        self._handled = self._handling.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._handling.__exit__(None, None, None)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = Interrupted(number)
        for known in self._handled:
            # A terminal that closes may say so twice: by its shell and by the system.
            signal.signal(known, signal.SIG_IGN if known is HANGUP else signal.SIG_DFL)
        # The terminal may be gone, or the signal may have come amid a line: then it goes on without a word.
        with contextlib.suppress(OSError, RuntimeError, SystemExit):
            self._announce(str(self.received))


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[list[signal.Signals]]:
    """Have signals handled, and say which."""
    # Only the main thread may set handlers, and what is ignored, as by nohup, stays so.
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS if main}
    handled = [number for number, known in before.items() if known is not signal.SIG_IGN]
    try:
        for number in handled:
            signal.signal(number, handler)
        yield handled
    finally:
        for number in handled:
            signal.signal(number, before[number])
