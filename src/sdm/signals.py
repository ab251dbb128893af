"""Signals and early ends of a command: one message, an exit code, and no half-written files."""

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

# Sent when the terminal is closed; not all systems have it.
HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
SIGNALS = [signal.SIGTERM, signal.SIGINT] + ([] if HANGUP is None else [HANGUP])

CONTINUES = "; the same command continues"


class Interrupted(KeyboardInterrupt):
    """A signal was received. Unlike the signal itself it runs every `finally`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Stopped(RuntimeError):
    """Work was stopped early; the message says why, and where it continues from."""

    of_all = False
    """Whether all processes of a job stop for this reason: then only rank 0 prints it."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class TrainingStopped(Stopped):
    """A run was stopped before its end; the message says why and where it continues from."""


@contextlib.contextmanager
def ending_with_one_message(advice: str = "") -> Iterator[None]:
    """End the process with one line instead of a traceback on user errors, signals and stops.

    `SDM_TRACEBACK=1` shows the traceback of errors.

    Args:
        advice: is printed after the name of a signal.
    """
    try:
        with _signals_raise():
            yield
    except (UserError, OSError) as error:
        if os.environ.get("SDM_TRACEBACK") == "1":
            raise
        if isinstance(error, RankError) and _rank():
            raise SystemExit(1) from error  # the failed rank and rank 0 print the error
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
    """Discard what is buffered for a stream whose reader is gone (`| head`, a closed terminal, a full disk).

    Otherwise the interpreter fails to flush it at exit, and the exit code is lost.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a notebook's stream is no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _speaker() -> str:
    return f"rank {_rank()}: " if _rank() else ""


def _say(text: str) -> None:
    """Print a line on standard error, if it is still open."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def _settle() -> None:
    """Flush standard output, or discard what is buffered."""
    try:
        sys.stdout.flush()
    except OSError:
        silence(sys.stdout)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """The first signal raises `Interrupted`; later ones are ignored, so that cleaning up is not interrupted.

    Code that is interrupted, such as a package amid its imports, may turn the exception into one of its own: whatever
    arrives here after a signal is the interrupt.
    """
    received: list[Interrupted] = []

    def stop(number: int, frame: FrameType | None) -> None:
        for known in handled:
            signal.signal(known, signal.SIG_IGN)
        received.append(Interrupted(number))
        raise received[0]

    with _handling(stop) as handled:
        try:
            yield
        except (Interrupted, Stopped, SystemExit):
            raise
        except BaseException as error:
            if received:
                raise received[0] from error
            raise


class PostponedSignals:
    """A context in which the first signal is only stored in `received`; a second one ends the process at once.

    Args:
        on_signal: is called with the name of the first signal.
    """

    def __init__(self, on_signal: Callable[[str], None] = lambda name: None) -> None:
        self.received: Interrupted | None = None
        self._on_signal, self._handling = on_signal, _handling(self._store)

    def __enter__(self) -> PostponedSignals:
        self._handled = self._handling.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._handling.__exit__(None, None, None)

    def _store(self, number: int, frame: FrameType | None) -> None:
        self.received = Interrupted(number)
        for known in self._handled:
            # A closing terminal may send SIGHUP twice: by its shell and by the system.
            signal.signal(known, signal.SIG_IGN if known is HANGUP else signal.SIG_DFL)
        # The terminal may be gone, or the signal may have interrupted a print: then nothing is shown.
        with contextlib.suppress(OSError, RuntimeError, SystemExit):
            self._on_signal(str(self.received))


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[list[signal.Signals]]:
    """Install a handler. Yields the signals that it handles."""
    # Only the main thread may set handlers, and ignored signals, as under nohup, stay ignored.
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
