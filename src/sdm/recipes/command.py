"""`sdm train RECIPE`: a recipe's configuration with the fields that the command line changes."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from sdm.recipes.ending import ending_with_one_message
from sdm.recipes.long_context import continue_from
from sdm.recipes.registry import RECIPES, listing, recipe
from sdm.training import TrainConfig, Trainer, TrainingError
from sdm.training.config_file import read_config, to_json
from sdm.training.run_folder import CONFIG

USAGE = """usage: sdm train RECIPE [--FIELD VALUE ...]

RECIPE is one of these, or the folder of a run to continue.
`sdm train RECIPE --help` lists the fields."""


@dataclass(frozen=True)
class TrainOptions:
    """Train a model in a run's folder. A folder that holds an unfinished run of this configuration is continued."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    run_dir: Path
    """The run's folder."""
    print_config: bool = False
    """Print the resolved configuration as JSON, and do nothing else."""


def train(arguments: list[str]) -> None:
    """Parse and run. Errors that a user can mend are one line."""
    with ending_with_one_message():
        options = parse(arguments)
        if options.print_config:
            print(json.dumps(to_json(options.config), indent=2))
            return
        trainer = Trainer(options.config, options.run_dir)
        folder = trainer.run()
    prompt = "--tokens 1 2 3" if trainer.tokenizer is None else "--prompt 'The '"
    print(f"{folder}: try `sdm generate {shlex.quote(str(options.run_dir))} {prompt}`")


def parse(arguments: list[str]) -> TrainOptions:
    name, rest = _recipe_name(arguments)
    if (Path(name) / CONFIG).is_file() and name not in RECIPES:
        config, folder = read_config(Path(name) / CONFIG), Path(name)
    else:
        config, folder = recipe(name), Path("runs") / name
        if name == "long-context":
            config, rest = _start_from(config, rest)
        config = _with_steps(config, rest)
    return tyro.cli(
        TrainOptions,
        prog=f"sdm train {name}",
        args=rest,
        default=TrainOptions(config, folder),
        config=(tyro.conf.AvoidSubcommands,),
    )


def _recipe_name(arguments: list[str]) -> tuple[str, list[str]]:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{listing()}")
        raise SystemExit(0)
    if arguments[0].startswith("-"):
        raise TrainingError(f"the recipe comes first, got {arguments[0]}; `sdm train` lists the recipes")
    return arguments[0], arguments[1:]


def _with_steps(config: TrainConfig, arguments: list[str]) -> TrainConfig:
    """A recipe's warmup and decay follow the number of steps, unless they are given themselves."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--schedule.steps", type=int, dest="steps", default=config.schedule.steps)
    try:
        steps = parser.parse_known_args(arguments)[0].steps
    except argparse.ArgumentError:  # the parser of all fields says what is wrong
        return config
    return replace(config, schedule=config.schedule.scaled(steps)) if steps > 0 else config


def _start_from(default: TrainConfig, arguments: list[str]) -> tuple[TrainConfig, list[str]]:
    """The run that is started from decides the model and the data, before any field is changed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--init-from", type=Path)
    parser.add_argument("--sequence-length", type=int, default=default.data.sequence_length)  # type: ignore[union-attr]
    known, rest = parser.parse_known_args(arguments)
    if known.init_from is None:
        if {"-h", "--help", "--print-config"} & set(rest):
            return default, rest
        raise TrainingError("the long-context recipe needs --init-from RUN, a finished run or a model's folder")
    return continue_from(default, known.init_from, known.sequence_length), rest
