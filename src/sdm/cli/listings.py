"""Texts that take seconds to make and are the same for everybody: the lists of recipes and measurements, the ladder.

They are stored in the package, so that `sdm train`, `sdm eval` and `sdm ladder` do not import torch. After a change
of their content, `python -c "from sdm.cli.listings import write; write()"` stores them again; a test compares.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

FOLDER = Path(__file__).parent / "listings"
NAMES = ("train", "eval", "ladder")


def stored_listing(arguments: list[str]) -> str | None:
    """Return the stored text that a command prints, or None if the command does more than print one."""
    if arguments[:1] == ["ladder"] and arguments[1:]:
        return None
    if arguments[:1] and arguments[0] in NAMES and arguments[1:] in ([], ["-h"], ["--help"]):
        with contextlib.suppress(OSError):
            return (FOLDER / f"{arguments[0]}.txt").read_text(encoding="utf-8")
    return None


def make_listing(name: str) -> str:
    """Make the text of a command anew, 80 columns wide."""
    from rich.console import Console

    from sdm.analysis.tables import ladder_tables, print_fitting
    from sdm.cli import eval_options, train_options

    printed = io.StringIO()
    if name == "ladder":
        print_fitting(Console(file=printed, width=80), *ladder_tables())
    else:
        parse = {"train": train_options.parse, "eval": eval_options.parse}[name]
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            parse([])
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines()) + "\n"


def write() -> None:
    """Store the texts of all commands."""
    FOLDER.mkdir(exist_ok=True)
    for name in NAMES:
        (FOLDER / f"{name}.txt").write_text(make_listing(name), encoding="utf-8")
