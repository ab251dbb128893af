"""The options of `sdm train RECIPE`: the recipe's parameters, and the fields of the configuration that it returns.

The arguments are parsed twice: the parameters, and the number of steps, decide the defaults of all the fields.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from sdm.cli.command import Command
from sdm.errors import TrainingError
from sdm.reproduce.recipes.registry import RECIPES, SHORT_NAMES, find, listing, parameters, recipe
from sdm.run import Run
from sdm.run.config import TrainConfig
from sdm.run.config_file import to_json

USAGE = """usage: sdm train RECIPE [--OPTION VALUE ...]

RECIPE is one of these, or the folder of a run to continue.
`sdm train RECIPE --help` lists the options."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Command):
    """Train a model in a run's folder. An unfinished run of this configuration is continued. A finished one can be
    extended."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    run_dir: Path
    """The run's folder."""
    extend: int | None = None
    """Continue the run in this folder, finished or not, to this number of steps in total. The decay moves to the new
    end; a run that has begun it goes back to the checkpoint at its start. Weights and moments are kept."""
    print_config: bool = False
    """Print the resolved configuration as JSON, and do nothing else."""

    def run(self) -> None:
        """Train, or print the configuration."""
        config, run = self._extended(), Run(self.run_dir)
        if self.print_config:
            print(json.dumps(to_json(config), indent=2))
            return
        if run.has_begun() and run.check_unchanged(config) is None and run.is_finished():
            if os.environ.get("RANK", "0") == "0":
                name = shlex.quote(str(self.run_dir))
                print(
                    f"{name}: finished after {config.schedule.steps} steps, nothing to do; `sdm train {name} "
                    "--extend STEPS` continues it to more steps"
                )
            return
        from sdm.training import Trainer  # not for --help

        trainer = Trainer(config, self.run_dir)
        folder = trainer.run()
        if not trainer.ranks.first:
            return
        prompt = "--tokens 1 2 3" if trainer.tokenizer is None else "--prompt 'The '"
        print(f"{folder}: try `sdm generate {shlex.quote(str(self.run_dir))} {prompt}`")

    def _extended(self) -> TrainConfig:
        """The configuration with the schedule that `--extend` asks for."""
        if self.extend is None:
            return self.config
        run = Run(self.run_dir)
        if not run.has_begun():
            raise TrainingError(f"--extend: there is no run to extend in {self.run_dir}; leave the option out")
        return replace(self.config, schedule=run.config().schedule.extended(self.extend))


def parse(arguments: list[str]) -> TrainOptions:
    """Parse the arguments that follow `sdm train`."""
    name, rest = _recipe_name(arguments)
    run = Run(Path(name))
    if name not in RECIPES and name not in SHORT_NAMES and run.exists():
        default = TrainOptions(config=run.written_config(), run_dir=run.folder)
        return _keep_warmup(_parse(name, TrainOptions, rest, default), rest)
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
    kind: type[TrainOptions] = dataclasses.make_dataclass(
        "TrainOptions", own, bases=(TrainOptions,), frozen=True, kw_only=True
    )
    kind.__doc__ = f"{(RECIPES[name].__doc__ or '').strip().splitlines()[0]}\n\n{TrainOptions.__doc__}"
    default = kind(config=config, run_dir=_folder(name, values), **{option: values[option] for option, _, _ in own})
    parsed = _parse(name, kind, rest, default)
    if "init_from" in values and parsed.config.init_from is None and not parsed.print_config:
        raise TrainingError(f"the {name} recipe needs --init-from RUN, a finished run or a model's folder")
    adapt = parsed.config.adapt
    if adapt is not None and adapt.base is None and adapt.scratch is None and not parsed.print_config:
        raise TrainingError(f"the {name} recipe needs --base FOLDER, a pretrained causal LM of transformers or a run")
    return _keep_warmup(parsed, rest)


def _keep_warmup(options: TrainOptions, arguments: list[str]) -> TrainOptions:
    """More steps for a run that has begun leave its warmup as it was, unless it is given."""
    schedule, run = options.config.schedule, Run(options.run_dir)
    if any(argument.split("=")[0] == "--schedule.warmup" for argument in arguments) or not run.has_begun():
        return options
    before = run.config().schedule
    if schedule.steps <= before.steps or schedule.warmup_steps == before.warmup_steps:
        return options
    return replace(options, config=replace(options.config, schedule=replace(schedule, warmup=before.warmup_steps)))


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
    kind: type[object] = dataclasses.make_dataclass("Parameters", [*options, steps])
    parsed, _ = tyro.cli(kind, args=arguments, return_unknown_args=True, add_help=False)
    values = dict(vars(parsed))
    steps_given = values.pop("steps_")
    return values, steps_given


def _folder(name: str, values: dict[str, Any]) -> Path:
    """Where a run goes: a folder for each choice of parameters."""
    defaults = {option: default for option, (_, default) in parameters(name).items()}
    for short, (full, given) in SHORT_NAMES.items():
        if full == name and defaults | given == values:
            return Path("runs") / short
    chosen = [str(x) for option, x in values.items() if x != defaults[option] and not isinstance(x, Path)]
    return Path("runs") / "-".join([name, *chosen])
