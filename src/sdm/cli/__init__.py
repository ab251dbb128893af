"""The `sdm` command: a table of subcommands, a file each."""

from __future__ import annotations

import io
import sys
from typing import Any

import tyro

from sdm import __version__
from sdm.cli.command import Command
from sdm.cli.display import logging_to_terminal
from sdm.cli.eval import Eval
from sdm.cli.export import Export
from sdm.cli.figure import Figure
from sdm.cli.generate import Generate
from sdm.cli.info import Info
from sdm.cli.ladder import Ladder
from sdm.cli.plan import Plan
from sdm.cli.probe import Probe
from sdm.cli.report import Report
from sdm.cli.reproduce import Reproduce
from sdm.cli.ruler import Ruler
from sdm.cli.scaling import Scaling
from sdm.cli.tokenizer import Tokenizer
from sdm.cli.trace import Trace
from sdm.cli.train import Train
from sdm.signals import ending_with_one_message

COMMANDS: dict[str, Any] = {
    "train": Train,
    "eval": Eval,
    "ruler": Ruler,
    "probe": Probe,
    "trace": Trace,
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
}
DESCRIPTION = "Language models with a sparse delta memory. `sdm --version` prints the version."


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name of a file may not be text; standard error takes it anyway
        sys.stdout.reconfigure(errors="backslashreplace")
    if arguments == ["--version"]:
        print(f"sdm {__version__}")
        return
    kind = COMMANDS.get(arguments[0], Command) if arguments else Command
    with ending_with_one_message(kind.advice), logging_to_terminal():
        _parse(kind, arguments).run()


def _parse(kind: type[Command], arguments: list[str]) -> Command:
    if kind in (Train, Eval, Probe):  # which options there are depends on the recipe or the measurement
        return kind.parse(arguments[1:])
    return tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="sdm", description=DESCRIPTION, args=arguments)
