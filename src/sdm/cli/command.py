"""What a command is, and the commands whose first argument decides about what follows.

`sdm train RECIPE`, `sdm eval NAME` and `sdm probe` have the options of the recipe or the measurement: `train_options`
and `eval_options` parse them, which imports torch. Without an argument they print lists, which take seconds to make and
are the same for everybody. Lists are stored in the package. After a change of their content,
`python -c "from sdm.cli.command import write_listings; write_listings()"` stores them again; a test compares.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from sdm.signals import CONTINUES


class Command:
    """Base of all commands. What it needs beyond the arguments is imported when it runs: `sdm --help` must be quick."""

    advice: ClassVar[str] = ""
    """Follows what is said of a signal that ended the command."""

    def run(self) -> None:
        """Run the command; a `UserError` ends it with its message alone."""
        raise NotImplementedError


@dataclass(frozen=True)
class Train(Command):
    """Train a model by a recipe; `sdm train` lists them."""

    advice = CONTINUES

    recipe: Annotated[str, tyro.conf.Positional]
    """A recipe's name, or the folder of a run to continue. Its fields follow: `sdm train RECIPE --help`."""

    @staticmethod
    def parse(arguments: list[str]) -> Command:
        """Which options there are depends on the recipe."""
        from sdm.cli.train_options import parse

        return parse(arguments)


@dataclass(frozen=True)
class Eval(Command):
    """Measure models; `sdm eval` lists the measurements."""

    advice = CONTINUES

    measurement: Annotated[str, tyro.conf.Positional]
    """A measurement's name, or "compare". Models and settings follow: `sdm eval NAME --help`."""

    @staticmethod
    def parse(arguments: list[str]) -> Command:
        """Which options there are depends on the measurement."""
        from sdm.cli.eval_options import parse

        return parse(arguments)


@dataclass(frozen=True)
class Probe(Command):
    """Measure how a model uses the keys and slots of its memories; short for `sdm eval probe`."""

    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, finished or not, or of models with SDM layers. Settings follow: `sdm probe --help`."""

    @staticmethod
    def parse(arguments: list[str]) -> Command:
        """Parse the arguments as `sdm eval probe` does."""
        from sdm.cli.eval_options import parse

        return parse(["probe", *arguments])


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


def write_listings() -> None:
    """Store the texts of all commands."""
    FOLDER.mkdir(exist_ok=True)
    for name in NAMES:
        (FOLDER / f"{name}.txt").write_text(make_listing(name), encoding="utf-8")
