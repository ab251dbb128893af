"""Writes a level of the paper's experiments into a folder: a folder for each run, a script that trains all of them, and
one that measures them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sdm.errors import UserError
from sdm.models import cost
from sdm.plan import ACCELERATORS
from sdm.reproduce.paper.commands import TASKS, Stage, measuring, shell, training, with_mesh
from sdm.reproduce.paper.runs import PaperRun, paper_runs
from sdm.run import Run
from sdm.run.config import TrainConfig
from sdm.run.config_file import write_config
from sdm.run.folder import CONFIG

# Where the user puts what cannot come with this package.
TEXT, CODE, TOKENIZER = "data/text", "data/code", "data/tokenizer"
TRAIN = (
    "# Start it on every machine, with HEAD set to the name of the first; or submit its lines one by one to as many",
    "# machines as --nnodes says. What was stopped continues when it is started again.",
    "#",
    "# Ours, where the paper is silent: steps of 2^21 tokens at every level and in fine-tuning, the lengths of warm-up",
    "# and decay, the weight decay, M0's scale, and a tenth of the learning rate in fine-tuning.",
)
MEASURE = (
    "# Start it on one machine with a GPU, once all runs have ended. What was stopped continues when started again.",
    "# data/tasks has the datasets of the short-context tasks; docs/evaluation-tasks.md says how.",
)


@dataclass(frozen=True)
class Written:
    """What `write_paper` has written."""

    runs: list[PaperRun]
    train: Path
    """The script that trains."""
    measure: Path
    """The script that measures and reports."""


def write_paper(
    level: int,
    output: Path,
    gpus: int,
    gpu: str,
    sources: Sequence[str] = (TEXT,),
    code: Sequence[str] = (CODE,),
    tokenizer: str = TOKENIZER,
) -> Written:
    """The runs of a level, each in OUTPUT/NAME as `sdm train` reads it, and two scripts. Runs that have begun stay as
    they are."""
    if gpus < 1:
        raise UserError(f"--gpus must be at least 1, got {gpus}")
    per_machine = ACCELERATORS[gpu].per_machine
    if gpus > per_machine and gpus % per_machine:
        raise UserError(f"--gpus must be a multiple of {per_machine}, those of a machine, got {gpus}")
    runs = [with_mesh(run, gpus, gpu) for run in paper_runs(level, output, tuple(sources), tokenizer)]
    for run in runs:
        folder = Run(output / run.name)
        if not folder.has_begun():
            folder.mark()
            write_config(folder.folder / CONFIG, run.config)
    title = (
        f"# The paper's experiments at level {level}, for {gpus} x {ACCELERATORS[gpu].name}; by `sdm reproduce paper`."
    )
    train, measure = (output / f"{what}-level-{level}.sh" for what in ("train", "measure"))
    _write_script(
        train, [title, *TRAIN, "#", *_listing(runs)], [*sources, tokenizer], training(runs, output, per_machine)
    )
    _write_script(measure, [title, *MEASURE], [*sources, *code, TASKS], measuring(runs, output, sources, code))
    return Written(runs, train, measure)


def _write_script(path: Path, comments: Sequence[str], needed: Sequence[str], stages: Sequence[Stage]) -> None:
    lines = ["#!/usr/bin/env bash", *comments, "set -euo pipefail", ""]
    lines += [f"test -e {shell([one])} || {{ echo {shell([f'{one} is missing'])} >&2; exit 1; }}" for one in needed]
    for stage in stages:
        lines += ["", f"# {stage.title}", *map(shell, stage.commands)]
    path.write_text("\n".join([*lines, ""]))
    path.chmod(0o755)


def _listing(runs: Sequence[PaperRun]) -> list[str]:
    width = max(len(run.name) for run in runs)
    return [f"#   {run.name:<{width}}  {run.gpus} GPUs, {describe(run.config)}" for run in runs]


def describe(config: TrainConfig) -> str:
    """Sizes of a run in a line."""
    model, data, mesh = cost(config.model.build(config.model.vocab_size or 0)), config.data, config.compute.mesh
    tokens = config.schedule.steps * data.batch_size * getattr(data, "sequence_length", 1)
    return (
        f"{model.parameters / 1e6:,.1f}M parameters, state {model.state_elements / 1e6:,.2f}M, "
        f"{tokens / 1e9:,.1f}B tokens, lr {config.optim.lr:g}, context {mesh.context} x channel {mesh.channel}"
    )
