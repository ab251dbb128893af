"""SIGTERM and Ctrl-C end a run after the step it is in, so that it can save first."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopSignals:
    """While it is entered, the first signal is only remembered in `received`; a second one ends the process."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        # Only the main thread may set handlers; elsewhere the host program decides about signals.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for known in self.SIGNALS:
            signal.signal(known, signal.SIG_DFL)
