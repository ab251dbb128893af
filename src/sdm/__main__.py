"""Where the command `sdm`, or `python -m sdm`, begins: Ctrl-C is one line from here on, also amid imports."""

import signal
import sys


def main() -> None:
    try:
        from sdm.cli import main as command

        command()
    except KeyboardInterrupt as interrupt:
        print("stopped: SIGINT", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from interrupt


if __name__ == "__main__":
    main()
