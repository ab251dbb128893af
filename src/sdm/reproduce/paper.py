"""`sdm reproduce paper`: the paper's experiments at its own sizes, for machines with GPUs.

    every level     SDM, GDN and full attention; the mixed hybrid at levels 1 to 8
    level 6         memories of a quarter and a sixteenth of the slots (the paper's 432, 108 and 27 MB a layer)
    level 8         Mamba2; SDM from a null M0, GDN from a learned state; W = 32, 64 with R = 32, 64, 128
    levels 8, 13    fine-tuning on 131,072 tokens, 4 and 16 billion in all, of what is measured after it

Each run is a folder on the first mesh that `sdm plan` says fits. One script trains all runs of a level, another
measures them.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdm.data.config import CorpusConfig
from sdm.errors import UserError
from sdm.evaluation.ruler.measurement import LENGTHS
from sdm.models import cost
from sdm.models.cost import LEVELS
from sdm.plan import ACCELERATORS, mesh_plans
from sdm.reproduce.recipes.paper import BATCH_TOKENS, LENGTH, PAPER_TOKENS, ladder, lengthen, paper_steps
from sdm.run import Run
from sdm.run.config import TrainConfig
from sdm.run.config_file import write_config
from sdm.run.folder import CONFIG
from sdm.run.mesh import MeshConfig


def _text(config: TrainConfig) -> CorpusConfig:
    assert isinstance(config.data, CorpusConfig)
    return config.data


MIXED = ("full_attention", "sdm")
MIXED_LEVELS = range(1, 9)
MEMORY_LEVEL, ABLATED_LEVEL = 6, 8
SLOT_SHARES = (4, 16)  # of which a smaller memory has one
WRITES, READS = (32, 64), (32, 64, 128)


@dataclass(frozen=True)
class PaperRun:
    """A run of the paper, and the GPUs that share it."""

    name: str
    """Name of its folder."""
    config: TrainConfig
    gpus: int = 1

    @property
    def is_long(self) -> bool:
        """Whether the run is a long-context fine-tuning, which starts from another run."""
        return self.config.init_from is not None


Models = dict[str, tuple[str, dict[str, Any]]]
"""By name: the global layer, and the fields of the model that differ from the ladder's."""


def _models(level: int) -> Models:
    """The models of a level, those with other numbers of writes and reads aside."""
    models: Models = {"sdm": ("sdm", {}), "gdn": ("gdn", {}), "attention": ("full_attention", {})}
    if level in MIXED_LEVELS:
        models["mixed"] = ("sdm", {"global_layer": MIXED})
    if level == MEMORY_LEVEL:
        slots = (LEVELS[level].hidden_size // (4 * LEVELS[level].num_memory_heads)) ** 2
        sizes = [slots // share for share in SLOT_SHARES]
        models |= {f"sdm-slots-{size}": ("sdm", {"num_slots": size}) for size in sizes}
    if level == ABLATED_LEVEL:
        models["mamba2"] = ("mamba2", {})
        models["sdm-null"] = ("sdm", {"learned_initial_state": False})
        models["gdn-learned"] = ("gdn", {"gdn_learned_initial_state": True})
    return models


def paper_runs(level: int, folder: Path, sources: tuple[str, ...], tokenizer: str) -> list[PaperRun]:
    """All of a level, in the order in which they must be run. `folder` is where the runs go: a fine-tuning names the
    run that it starts from."""
    models = _models(level)
    accesses: Models = {
        f"sdm-w{writes}-r{reads}": ("sdm", {"num_writes": writes, "num_reads": reads})
        for writes, reads in itertools.product(WRITES, READS)
        if level == ABLATED_LEVEL and (writes, reads) != (64, 64)  # the ladder's own
    }
    runs = []
    for name, (layer, fields) in (models | accesses).items():
        config = ladder(level, layer)
        data = replace(_text(config), sources=sources, tokenizer=tokenizer)
        runs.append(
            PaperRun(f"level-{level}-{name}", replace(config, model=replace(config.model, **fields), data=data))
        )
    if level not in PAPER_TOKENS:
        return runs
    return runs + [_long(level, run, folder) for run in runs[: len(models)]]


def _long(level: int, run: PaperRun, folder: Path) -> PaperRun:
    """The fine-tuning of a run, with as many tokens a step as pre-training has."""
    rows = BATCH_TOKENS // LENGTH
    config = lengthen(replace(run.config, init_from=folder / run.name), LENGTH, paper_steps(level, rows))
    config = replace(
        config,
        data=replace(_text(config), batch_size=rows),
        compute=replace(config.compute, accumulation=rows, checkpointing="block"),
        checkpoint=replace(config.checkpoint, every=100),
        monitor=replace(config.monitor, log_every=10, memory_every=100),
    )
    return PaperRun(f"{run.name}-long", config)


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
TASKS = "data/tasks"  # datasets of the short-context tasks
LADDER = ("sdm", "gdn", "attention", "mixed")  # what laws are fitted to
SCALING = ("--loss", "train", "--output")  # the paper: the mean of the last ten lines


Stages = dict[str, list[list[str]]]
"""Commands by the title of a stage, each to be started when those before it have ended."""


def write_paper(
    level: int,
    output: Path,
    gpus: int,
    gpu: str,
    sources: Sequence[str] = (TEXT,),
    code: Sequence[str] = (CODE,),
    tokenizer: str = TOKENIZER,
) -> tuple[list[PaperRun], Path, Path]:
    """Write the runs of a level, each in OUTPUT/NAME as `sdm train` reads it. Runs that have begun stay as they are.

    Returns:
        The runs, the script that trains them, and the script that measures them and reports.
    """
    if gpus < 1:
        raise UserError(f"--gpus must be at least 1, got {gpus}")
    machine = ACCELERATORS[gpu]
    if gpus > machine.per_machine and gpus % machine.per_machine:
        raise UserError(f"--gpus must be a multiple of {machine.per_machine}, those of a machine, got {gpus}")
    runs = [with_mesh(run, gpus, gpu) for run in paper_runs(level, output, tuple(sources), tokenizer)]
    for run in runs:
        folder = Run(output / run.name)
        if not folder.has_begun():
            folder.mark()
            write_config(folder.folder / CONFIG, run.config)
    title = f"# The paper's experiments at level {level}, for {gpus} x {machine.name}; by `sdm reproduce paper`."
    width = max(len(run.name) for run in runs)
    listing = [f"#   {run.name:<{width}}  {run.gpus} GPUs, {describe(run.config)}" for run in runs]
    train, measure = (output / f"{what}-level-{level}.sh" for what in ("train", "measure"))
    stages = training(runs, output, machine.per_machine)
    _write_script(train, [title, *TRAIN, "#", *listing], [*sources, tokenizer], stages)
    _write_script(measure, [title, *MEASURE], [*sources, *code, TASKS], measuring(runs, output, sources, code))
    return runs, train, measure


def _write_script(path: Path, comments: Sequence[str], needed: Sequence[str], stages: Stages) -> None:
    lines = ["#!/usr/bin/env bash", *comments, "set -euo pipefail", ""]
    lines += [f"test -e {shell([name])} || {{ echo {shell([f'{name} is missing'])} >&2; exit 1; }}" for name in needed]
    for title, commands in stages.items():
        lines += ["", f"# {title}", *map(shell, commands)]
    path.write_text("\n".join([*lines, ""]))
    path.chmod(0o755)


def describe(config: TrainConfig) -> str:
    """Sizes of a run in a line."""
    model, data, mesh = cost(config.model.build(config.model.vocab_size or 0)), _text(config), config.compute.mesh
    tokens = config.schedule.steps * data.batch_size * data.sequence_length
    return (
        f"{model.parameters / 1e6:,.1f}M parameters, state {model.state_elements / 1e6:,.2f}M, "
        f"{tokens / 1e9:,.1f}B tokens, lr {config.optim.lr:g}, context {mesh.context} x channel {mesh.channel}"
    )


def with_mesh(run: PaperRun, gpus: int, gpu: str) -> PaperRun:
    """The run on the first mesh that fits by `sdm plan`: as many ranks for rows as possible, then few for the tokens of
    a row, then few for the channels of memories. What cannot use all GPUs gets half of them, and so on: the 15 heads of
    GDN at level 8 cannot be shared by ranks, nor 16 long rows by 64."""
    length = _text(run.config).sequence_length
    ways = [(run.config, length)]
    if _text(run.config).layout == "rows" and not run.config.unbounded_layers():
        # Segment by segment, which takes less memory where states have a fixed size: the activations of one at a time.
        config = replace(run.config, compute=replace(run.config.compute, checkpointing="segment"))
        ways.append((config, config.compute.segment_length))
    counts = [gpus // 2**halvings for halvings in range(gpus.bit_length()) if gpus % 2**halvings == 0]
    for count, (config, tokens) in itertools.product(counts, ways):
        for plan in mesh_plans(config, count, gpu, tokens):
            if plan.fits:
                # The degree of data is left open: it is what the machines have.
                degrees = MeshConfig(context=plan.work.mesh.context, channel=plan.work.mesh.channel)
                return replace(run, config=replace(config, compute=replace(config.compute, mesh=degrees)), gpus=count)
    raise UserError(
        f"--gpus: {run.name} does not fit on {gpus} x {ACCELERATORS[gpu].name}; take more, or see "
        f"`sdm plan --gpus {gpus} --gpu {gpu} --sequence-length {length}`"
    )


def training(runs: Sequence[PaperRun], folder: Path, per_machine: int) -> Stages:
    """Pre-training, then what starts from it."""
    stages: Stages = {}
    for run in runs:
        machines = max(1, run.gpus // per_machine)
        start = ["torchrun", "--nnodes", str(machines), "--nproc-per-node", str(min(run.gpus, per_machine))]
        if machines > 1:
            start += ["--max-restarts", "3", "--rdzv-backend", "c10d"]
            start += ["--rdzv-endpoint", "$HEAD:29500", "--rdzv-id", run.name]
        stage = stages.setdefault("Long-context fine-tuning" if run.is_long else "Pre-training", [])
        stage.append([*start, "-m", "sdm", "train", str(folder / run.name)])
    return stages


def measuring(runs: Sequence[PaperRun], folder: Path, text: Sequence[str], code: Sequence[str]) -> Stages:
    """Of every model in its last form. `text` and `code` are what likelihoods are measured on."""
    names = {run.name for run in runs}
    last = [run for run in runs if f"{run.name}-long" not in names]
    asked = {
        "Likelihood of text": ["nll", "--data", *text],
        "Likelihood by position in code": ["position", "--data", *code, "--length", str(2**20), "--join", "always"],
        "RULER": ["ruler", "--lengths", *map(str, LENGTHS)],
        "Short-context tasks; HumanEval+ runs programs that the model writes": [
            *("harness", "--data-dir", TASKS, "--run-code")
        ],
    }
    stages: Stages = {
        title: [["sdm", "eval", name, str(folder / run.name), *options] for run in last]
        for title, (name, *options) in asked.items()
    }
    stages["How memories are used"] = [
        ["sdm", "probe", str(folder / run.name)]
        for run in last
        if "sdm" in (run.config.model.build(run.config.model.vocab_size or 0).layer_types or ())
    ]
    reported = [str(folder / run.name) for run in runs]
    stages["Report"] = [["sdm", "report", *reported, "--output", str(folder / "report")]]
    ladders = [str(folder / f"level-*-{name}") for name in LADDER]
    stages["Scaling laws, of all levels whose runs are in this folder: three or more"] = [
        ["sdm", "scaling", *ladders, *SCALING, str(folder / "scaling")]
    ]
    return stages


def shell(command: Sequence[str]) -> str:
    """A line of a shell script. $HEAD stays a variable, and the * in the last part of a path a pattern."""
    return " ".join(map(_word, command))


def _word(word: str) -> str:
    folder, _, name = word.rpartition("/")
    if "*" in name:
        return f"{shlex.quote(folder)}/{name}"
    return word if word.startswith("$HEAD") else shlex.quote(word)
