"""The options of `sdm train RECIPE`: the recipe's parameters, and the fields of the configuration that it returns.

The arguments are parsed twice: the parameters, and the number of steps, decide the defaults of all the fields.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from sdm.cli.command import Command
from sdm.reproduce.recipes.registry import RECIPES, SHORT_NAMES, find, listing, parameters, recipe
from sdm.run import Run
from sdm.run.config import TrainConfig
from sdm.run.config_file import to_json
from sdm.run.errors import TrainingError
from sdm.training import Trainer

USAGE = """usage: sdm train RECIPE [--OPTION VALUE ...]

RECIPE is one of these, or the folder of a run to continue.
`sdm train RECIPE --help` lists the options."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Command):
    """Train a model in a run's folder. A folder that holds an unfinished run of this configuration is continued."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    run_dir: Path
    """The run's folder."""
    print_config: bool = False
    """Print the resolved configuration as JSON, and do nothing else."""

    def run(self) -> None:
        if self.print_config:
            print(json.dumps(to_json(self.config), indent=2))
            return
        trainer = Trainer(self.config, self.run_dir)
        folder = trainer.run()
        if not trainer.ranks.first:
            return
        prompt = "--tokens 1 2 3" if trainer.tokenizer is None else "--prompt 'The '"
        print(f"{folder}: try `sdm generate {shlex.quote(str(self.run_dir))} {prompt}`")


def parse(arguments: list[str]) -> TrainOptions:
    name, rest = _recipe_name(arguments)
    run = Run(Path(name))
    if name not in RECIPES and name not in SHORT_NAMES and run.exists():
        return _parse(name, TrainOptions, rest, TrainOptions(config=run.written_config(), run_dir=run.folder))
    name, given = find(name)
    options = [
        (option, hint, field(default=given.get(option, default)))
        for option, (hint, default) in parameters(name).items()
    ]
    values, steps = _parameters(options, rest)
    config = recipe(name, **values)
    if steps is not None and steps > 0:
        # Warmup and decay follow the number of steps, unless they are given themselves.
        config = replace(config, schedule=config.schedule.scaled(steps))
    own = [option for option in options if option[0] not in TrainConfig.__dataclass_fields__]
    kind: Any = dataclasses.make_dataclass("TrainOptions", own, bases=(TrainOptions,), frozen=True, kw_only=True)
    kind.__doc__ = f"{(RECIPES[name].__doc__ or '').strip().splitlines()[0]}\n\n{TrainOptions.__doc__}"
    default = kind(config=config, run_dir=_folder(name, values), **{option: values[option] for option, _, _ in own})
    parsed = _parse(name, kind, rest, default)
    if "init_from" in values and parsed.config.init_from is None and not parsed.print_config:
        raise TrainingError(f"the {name} recipe needs --init-from RUN, a finished run or a model's folder")
    return parsed


def _recipe_name(arguments: list[str]) -> tuple[str, list[str]]:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{listing()}")
        raise SystemExit(0)
    if arguments[0].startswith("-"):
        raise TrainingError(f"the recipe comes first, got {arguments[0]}; `sdm train` lists the recipes")
    return arguments[0], arguments[1:]


def _parse(name: str, kind: type[TrainOptions], arguments: list[str], default: TrainOptions) -> TrainOptions:
    return tyro.cli(
        kind, prog=f"sdm train {name}", args=arguments, default=default, config=(tyro.conf.AvoidSubcommands,)
    )


def _parameters(options: list[tuple[str, Any, Any]], arguments: list[str]) -> tuple[dict[str, Any], int | None]:
    """The values of a recipe's parameters, and the number of steps if it is given."""
    steps = ("steps_", Annotated[int | None, tyro.conf.arg(name="schedule.steps")], field(default=None))
    kind: Any = dataclasses.make_dataclass("Parameters", [*options, steps])
    found, _ = tyro.cli(kind, args=arguments, return_unknown_args=True, add_help=False)
    values = {option: getattr(found, option) for option, _, _ in options}
    return values, found.steps_


def _folder(name: str, values: dict[str, Any]) -> Path:
    """Where a run goes: a folder for each choice of parameters."""
    defaults = {option: default for option, (_, default) in parameters(name).items()}
    for short, (full, given) in SHORT_NAMES.items():
        if full == name and defaults | given == values:
            return Path("runs") / short
    chosen = [str(x) for option, x in values.items() if x != defaults[option] and not isinstance(x, Path)]
    return Path("runs") / "-".join([name, *chosen])
