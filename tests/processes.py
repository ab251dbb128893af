"""Programs that are started, sent a signal, and asked what they said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def stop(
    arguments: list[str], number: signal.Signals, begun: Callable[[], bool], path: Path | None = None
) -> tuple[str, str]:
    """Start Python, send it a signal once it has begun, and return what it printed and what it said about it.

    `path` comes before the tests where modules are looked for.
    """
    places = [str(place) for place in (path, Path(__file__).parent) if place is not None]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        for _ in range(1200):
            if begun():
                break
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(number)
        printed, said = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        return printed.decode(), said.decode()
