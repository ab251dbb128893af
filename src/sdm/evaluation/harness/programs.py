"""Programs that a model has written: run to see whether they do what was asked.

They run as the user, in a process of their own with limits on time and memory and in an empty folder. That stops an
endless loop; it does not stop a program that means harm. It is for a machine where there is nothing to lose.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 10.0
MEMORY = 4 * 2**30  # bytes

# Set in the process itself: a hook before it would not be safe in a process with threads.
_LIMITS = """
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**24, 2**24))
except (ImportError, ValueError, OSError):
    pass
with open({path!r}, encoding="utf-8") as file:
    program = file.read()
exec(compile(program, "answer.py", "exec"), {{"__name__": "__main__"}})
open({passed!r}, "w").close()
"""


def runs_well(program: str, seconds: float = SECONDS) -> bool:
    """Whether a program comes to its end without an exception."""
    with tempfile.TemporaryDirectory() as folder:
        path, passed = Path(folder) / "answer.py", Path(folder) / "passed"
        path.write_text(program, encoding="utf-8", errors="replace")
        source = _LIMITS.format(memory=MEMORY, path=str(path), passed=str(passed))
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", source],
            cwd=folder,
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        finally:
            _end(process)
        # An exit of the program's own, `sys.exit(0)` before the tests, is not an end that was reached.
        return process.returncode == 0 and passed.exists()


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it has started."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
