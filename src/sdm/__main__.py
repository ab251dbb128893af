"""The entry point of the command `sdm` and of `python -m sdm`."""

import os
import signal
import sys
from types import FrameType

# Iterations for which a thread of OpenMP spins before it sleeps: about a hundred microseconds, longer than most gaps
# between the parallel regions of a step (benchmarks/busy_machine.py). libgomp's default, many milliseconds, takes the
# cores away from the threads that have work wherever other processes run: training becomes twenty times slower.
SPIN_COUNT = "2000"
BLOCK_TIME = "1"  # milliseconds, for the OpenMP runtimes of LLVM and Intel, which count so
WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def bound_spinning() -> None:
    """Let idle OpenMP threads sleep soon, unless the environment has a setting for that. Call it before torch loads."""
    if not any(name in os.environ for name in WAIT_SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
        os.environ["KMP_BLOCKTIME"] = BLOCK_TIME


def main() -> None:
    """Run the command of `sys.argv`. Ctrl-C and missing packages end it with one line, also during imports."""
    bound_spinning()
    interrupted = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    try:
        from sdm.cli import main as command

        command()
    except BaseException as error:
        # A package that is being imported may turn the interrupt into an error of its own.
        if interrupted or isinstance(error, KeyboardInterrupt):
            print("stopped: SIGINT", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from error
        if isinstance(error, ModuleNotFoundError) and error.name and os.environ.get("SDM_TRACEBACK") != "1":
            package = error.name.split(".")[0]
            if package != "sdm":
                raise SystemExit(
                    f"error: this command needs the package {package}, which is not installed here: "
                    "pip install sparse-delta-memory installs it"
                ) from error
        raise


if __name__ == "__main__":
    main()
