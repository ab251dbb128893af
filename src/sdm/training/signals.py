"""SIGTERM, SIGHUP and Ctrl-C end a run after the step it is in, so that it can save first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

# Not all systems have SIGHUP, which says that the terminal was closed.
HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)


class StopSignals:
    """While it is entered, the first signal is only remembered in `received` and announced; a second one ends the
    process."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT) + (() if HANGUP is None else (HANGUP,))

    def __init__(self, announce: Callable[[signal.Signals], None] = lambda number: None) -> None:
        self.received: signal.Signals | None = None
        self._announce = announce
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        # Only the main thread may set handlers; elsewhere the host program decides about signals. What is ignored, as
        # by nohup, stays so.
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in self.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._remember) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for known in self._before:
            # A terminal that closes may say so twice: by its shell and by the system.
            signal.signal(known, signal.SIG_IGN if known is HANGUP else signal.SIG_DFL)
        # The terminal may be gone, or the signal may have come amid a line: then it is saved without a word.
        with contextlib.suppress(OSError, RuntimeError, SystemExit):
            self._announce(self.received)
