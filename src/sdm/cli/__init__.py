"""The `sdm` command: a table of subcommands, a file each."""

from __future__ import annotations

import io
import sys
import textwrap
from typing import Any

import tyro

from sdm import __version__
from sdm.cli.chat import Chat
from sdm.cli.command import Command, Eval, Probe, Train, stored_listing
from sdm.cli.display import logging_to_terminal
from sdm.cli.export import Export, Ruler, Tokenizer
from sdm.cli.generate import Generate
from sdm.cli.report import Figure, Plot, Report, Scaling
from sdm.cli.reproduce import Reproduce
from sdm.cli.sizes import Info, Ladder, Plan
from sdm.cli.state import State
from sdm.cli.trace import Trace
from sdm.errors import UserError, did_you_mean
from sdm.signals import ending_with_one_message

GROUPS: dict[str, dict[str, type[Command]]] = {
    "Train a model": {"train": Train, "tokenizer": Tokenizer, "plot": Plot, "report": Report},
    "Measure it": {"eval": Eval, "probe": Probe, "ruler": Ruler, "scaling": Scaling},
    "Use it": {"generate": Generate, "chat": Chat, "export": Export},
    "Look into it": {"info": Info, "trace": Trace, "state": State},
    "The paper": {"reproduce": Reproduce, "ladder": Ladder, "figure": Figure, "plan": Plan},
}
"""Commands by what a user wants."""
COMMANDS: dict[str, Any] = {name: kind for group in GROUPS.values() for name, kind in group.items()}
DESCRIPTION = "Language models with a sparse delta memory."
EPILOGUE = (
    "`sdm train` and `sdm eval` list recipes and measurements, `sdm COMMAND --help`",
    "the options of a command. Commands that print tables take --json.",
)


# What users of other trainers type, and the option that they mean.
SYNONYMS = {
    **dict.fromkeys(("--lr", "--learning-rate", "--optim.learning-rate", "--optimizer.lr"), "--optim.lr"),
    **dict.fromkeys(("--steps", "--max-steps", "--schedule.max-steps"), "--schedule.steps"),
    **dict.fromkeys(("--batch-size", "--per-device-train-batch-size"), "--data.batch-size"),
    **dict.fromkeys(("--seq-len", "--sequence-length", "--data.seq-len"), "--data.sequence-length"),
    **dict.fromkeys(("--output", "--output-dir"), "--run-dir"),
    "--threads": "--compute.threads",
    "--tokenizer": "--data.tokenizer",
}


def main(arguments: list[str] | None = None) -> None:
    """Run a command.

    Args:
        arguments: the command's name and its options; None: those of the process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name of a file may not be text; standard error takes it anyway
        sys.stdout.reconfigure(errors="backslashreplace")
    text = _text(arguments)
    if text is not None:
        with ending_with_one_message():
            print(text, end="")
        return
    kind = COMMANDS.get(arguments[0], Command) if arguments else Command
    with ending_with_one_message(kind.advice), logging_to_terminal():
        _parse(kind, arguments).run()


def _text(arguments: list[str]) -> str | None:
    """What a call prints that needs no command: the version, the help, a stored list."""
    if arguments == ["--version"]:
        return f"sdm {__version__}\n"
    if arguments in ([], ["-h"], ["--help"]):
        return f"{usage()}\n"
    return stored_listing(arguments)


def usage() -> str:
    """Return what `sdm --help` prints: the commands, grouped by what a user wants."""
    lines = ["usage: sdm COMMAND [ARGUMENTS]", "", DESCRIPTION]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, kind in group.items():
            summary = " ".join((kind.__doc__ or "").split()).split(". ")[0].split("; ")[0].rstrip(".")
            lines += textwrap.wrap(summary, 80, initial_indent=f"  {name:<11}", subsequent_indent=" " * 13)
    return "\n".join([*lines, "", *EPILOGUE])


def _parse(kind: type[Command], arguments: list[str]) -> Command:
    if kind is Command and not arguments[0].startswith("-"):
        raise UserError(f"there is no command {arguments[0]!r}; {did_you_mean(arguments[0], COMMANDS)}")
    if kind is Train:
        for argument in arguments:
            option = argument.split("=")[0].replace("_", "-")
            if option in SYNONYMS and not _is_recipe_option(arguments[1], option):
                raise UserError(f"there is no option {option}; did you mean {SYNONYMS[option]}?")
    if kind in (Train, Eval, Probe):  # which options there are depends on the recipe or the measurement
        return kind.parse(arguments[1:])
    try:
        return tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="sdm", description=DESCRIPTION, args=arguments)
    except ImportError as error:  # the completion of some shells takes another package
        if not arguments[0].startswith("--tyro-"):
            raise
        raise UserError(f"{' '.join(arguments[:2])}: {error}; there are bash and zsh") from error


def _is_recipe_option(recipe: str, option: str) -> bool:
    from sdm.reproduce.recipes.registry import RECIPES, parameters

    return recipe in RECIPES and option.removeprefix("--").replace("-", "_") in parameters(recipe)
