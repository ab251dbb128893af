"""Programs that are started, sent a signal, and asked what they said."""

from __future__ import annotations

import os
import signal
import socket
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


def run_ranks(script: Path, count: int, *arguments: str, seconds: float = 300) -> list[str]:
    """Run a script as so many ranks, as torchrun would, one thread each. Returns what each printed; raises if one
    fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        printed = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(printed)
    return printed
