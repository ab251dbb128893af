"""The `sdm` command: a table of subcommands, a file each."""

from __future__ import annotations

import io
import sys
from typing import Any

import tyro

from sdm import __version__
from sdm.cli.chat import Chat
from sdm.cli.command import Command
from sdm.cli.display import logging_to_terminal
from sdm.cli.eval import Eval
from sdm.cli.export import Export
from sdm.cli.figure import Figure
from sdm.cli.generate import Generate
from sdm.cli.info import Info
from sdm.cli.ladder import Ladder
from sdm.cli.listings import stored_listing
from sdm.cli.plan import Plan
from sdm.cli.probe import Probe
from sdm.cli.report import Report
from sdm.cli.reproduce import Reproduce
from sdm.cli.ruler import Ruler
from sdm.cli.scaling import Scaling
from sdm.cli.state import State
from sdm.cli.tokenizer import Tokenizer
from sdm.cli.trace import Trace
from sdm.cli.train import Train
from sdm.errors import UserError
from sdm.signals import ending_with_one_message

COMMANDS: dict[str, Any] = {
    "train": Train,
    "eval": Eval,
    "ruler": Ruler,
    "probe": Probe,
    "trace": Trace,
    "state": State,
    "scaling": Scaling,
    "report": Report,
    "export": Export,
    "tokenizer": Tokenizer,
    "reproduce": Reproduce,
    "ladder": Ladder,
    "plan": Plan,
    "figure": Figure,
    "info": Info,
    "generate": Generate,
    "chat": Chat,
}
DESCRIPTION = "Language models with a sparse delta memory. `sdm --version` prints the version."


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
    if arguments == ["--version"]:
        print(f"sdm {__version__}")
        return
    listing = stored_listing(arguments)
    if listing is not None:
        print(listing, end="")
        return
    kind = COMMANDS.get(arguments[0], Command) if arguments else Command
    with ending_with_one_message(kind.advice), logging_to_terminal():
        _parse(kind, arguments).run()


def _parse(kind: type[Command], arguments: list[str]) -> Command:
    if kind is Train:
        for argument in arguments:
            option = argument.split("=")[0].replace("_", "-")
            if option in SYNONYMS and not _is_recipe_option(arguments[1], option):
                raise UserError(f"there is no option {option}; did you mean {SYNONYMS[option]}?")
    if kind in (Train, Eval, Probe):  # which options there are depends on the recipe or the measurement
        return kind.parse(arguments[1:])
    return tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="sdm", description=DESCRIPTION, args=arguments)


def _is_recipe_option(recipe: str, option: str) -> bool:
    from sdm.reproduce.recipes.registry import RECIPES, parameters

    return recipe in RECIPES and option.removeprefix("--").replace("-", "_") in parameters(recipe)
