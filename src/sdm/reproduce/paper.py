"""`sdm reproduce paper` and `sdm plan`: the paper's experiments at its own sizes, for machines with GPUs.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sdm.data.config import CorpusConfig
from sdm.errors import UserError
from sdm.evaluation.ruler.measurement import LENGTHS
from sdm.models import cost
from sdm.models.cost import LEVELS
from sdm.plan import ACCELERATORS, Plan, Workload, make_plan
from sdm.reproduce.recipes.paper import BATCH_TOKENS, LENGTH, PAPER_TOKENS, ladder, lengthen, paper_steps
from sdm.run import Run
from sdm.run.config import TrainConfig
from sdm.run.config_file import write_config
from sdm.run.folder import CONFIG
from sdm.run.mesh import Mesh, MeshConfig, valid_meshes

MOST_CONTEXT = 64  # ranks for one sequence


def _meshes(config: TrainConfig, gpus: int, gpu: str) -> list[Mesh]:
    """The meshes that can work, with channels split within one machine at most."""
    most = ACCELERATORS[gpu].per_machine
    return [mesh for mesh in valid_meshes(config, gpus) if mesh.channel <= most and mesh.context <= MOST_CONTEXT]


def plans(
    level: int,
    global_layer: str,
    gpus: int,
    gpu: str,
    sequence_length: int,
    batch_tokens: int,
    rows: int,
    precision: str,
    checkpointing: str,
    keep_weights: bool = False,
) -> list[Plan]:
    """One for every mesh that can work, with channels split within one machine at most."""
    if level not in LEVELS:
        raise UserError(f"--level must be one of {', '.join(map(str, LEVELS))}, got {level}")
    device, batch_size = ACCELERATORS[gpu], batch_tokens // sequence_length
    config = ladder(level, global_layer)
    assert isinstance(config.data, CorpusConfig)
    data = replace(config.data, sequence_length=sequence_length, batch_size=batch_size)
    config = replace(config, data=data, compute=replace(config.compute, accumulation=1))
    meshes = [mesh for mesh in _meshes(config, gpus, gpu) if mesh.context <= sequence_length]
    if not meshes:
        raise UserError(
            f"no mesh of {gpus} GPUs works for a step of {batch_size} rows of {sequence_length} tokens; take fewer "
            "--gpus or more --batch-tokens"
        )
    model = config.model.build(config.model.vocab_size or 0)
    return [
        make_plan(
            Workload(model, mesh, sequence_length, batch_size, rows, precision, checkpointing, keep_weights), device
        )
        for mesh in meshes
    ]


MIXED = ("full_attention", "sdm")
MIXED_LEVELS = range(1, 9)
MEMORY_LEVEL, ABLATED_LEVEL = 6, 8
SLOT_SHARES = (4, 16)  # of which a smaller memory has one
WRITES, READS = (32, 64), (32, 64, 128)

Purpose = Literal["ladder", "memory size", "initial state", "writes and reads", "long context"]


@dataclass(frozen=True)
class PaperRun:
    """A run, and which experiment it belongs to."""

    name: str
    """Of its folder."""
    purpose: Purpose
    config: TrainConfig
    gpus: int = 1
    """That share it."""

    @property
    def is_long(self) -> bool:
        """Whether the run is a long-context fine-tuning, which starts from another run."""
        return self.purpose == "long context"


def paper_runs(level: int, folder: Path, sources: tuple[str, ...], tokenizer: str) -> list[PaperRun]:
    """All of a level, in the order in which they must be run. `folder` is where the runs go: a fine-tuning names the
    run that it starts from."""
    if level not in LEVELS:
        raise UserError(f"--level must be one of {', '.join(map(str, LEVELS))}, got {level}")
    runs = list(_pretraining(level))
    if level in PAPER_TOKENS:
        runs += [_long(level, run, folder) for run in runs if run.purpose in ("ladder", "initial state")]
    return [replace(run, config=_with_data(run.config, sources, tokenizer)) for run in runs]


def _pretraining(level: int) -> Iterator[PaperRun]:
    for name, layer in (("sdm", "sdm"), ("gdn", "gdn"), ("attention", "full_attention")):
        yield _pretrain(name, "ladder", level, layer)
    if level in MIXED_LEVELS:
        yield _pretrain("mixed", "ladder", level, "sdm", global_layer=MIXED)
    if level == MEMORY_LEVEL:
        slots = _slots(level)
        for share in SLOT_SHARES:
            yield _pretrain(f"sdm-slots-{slots // share}", "memory size", level, "sdm", num_slots=slots // share)
    if level == ABLATED_LEVEL:
        yield _pretrain("mamba2", "ladder", level, "mamba2")
        yield _pretrain("sdm-null", "initial state", level, "sdm", learned_initial_state=False)
        yield _pretrain("gdn-learned", "initial state", level, "gdn", gdn_learned_initial_state=True)
        for writes, reads in itertools.product(WRITES, READS):
            if (writes, reads) != (64, 64):  # the ladder's own
                name = f"sdm-w{writes}-r{reads}"
                yield _pretrain(name, "writes and reads", level, "sdm", num_writes=writes, num_reads=reads)


def _pretrain(name: str, purpose: Purpose, level: int, layer: str, **fields: Any) -> PaperRun:
    config = ladder(level, layer)
    return PaperRun(f"level-{level}-{name}", purpose, replace(config, model=replace(config.model, **fields)))


def _slots(level: int) -> int:
    row = LEVELS[level]
    return (row.hidden_size // (4 * row.num_memory_heads)) ** 2


def _long(level: int, run: PaperRun, folder: Path) -> PaperRun:
    """With as many tokens a step as pre-training has."""
    rows = BATCH_TOKENS // LENGTH
    config = lengthen(replace(run.config, init_from=folder / run.name), LENGTH, paper_steps(level, rows))
    assert isinstance(config.data, CorpusConfig)
    config = replace(
        config,
        data=replace(config.data, batch_size=rows),
        compute=replace(config.compute, accumulation=rows, checkpointing="block"),
        checkpoint=replace(config.checkpoint, every=100),
        monitor=replace(config.monitor, log_every=10, memory_every=100),
    )
    return PaperRun(f"{run.name}-long", "long context", config)


def _with_data(config: TrainConfig, sources: tuple[str, ...], tokenizer: str) -> TrainConfig:
    assert isinstance(config.data, CorpusConfig)
    return replace(config, data=replace(config.data, sources=sources, tokenizer=tokenizer))


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
    lines += [f"test -e {shell([name])} || {{ echo {shell([f'{name} is missing'])} >&2; exit 1; }}" for name in needed]
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


@dataclass(frozen=True)
class Stage:
    """Commands that belong together, each to be started when those before it have ended."""

    title: str
    commands: tuple[tuple[str, ...], ...]


def with_mesh(run: PaperRun, gpus: int, gpu: str) -> PaperRun:
    """The run on the first mesh that fits by `sdm plan`: as many ranks for rows as possible, then few for the tokens of
    a row, then few for the channels of memories. What cannot use all GPUs gets half of them, and so on: the 15 heads of
    GDN at level 8 cannot be shared by ranks, nor 16 long rows by 64."""
    counts = [gpus // 2**halvings for halvings in range(gpus.bit_length()) if gpus % 2**halvings == 0]
    for count in counts:
        for config in _ways(run.config):
            mesh = _first_that_fits(config, count, gpu)
            if mesh is not None:
                # The degree of data is left open: it is what the machines have.
                degrees = MeshConfig(context=mesh.context, channel=mesh.channel)
                return replace(run, config=replace(config, compute=replace(config.compute, mesh=degrees)), gpus=count)
    length = getattr(run.config.data, "sequence_length", 0)
    raise UserError(
        f"--gpus: {run.name} does not fit on {gpus} x {ACCELERATORS[gpu].name}; take more, or see "
        f"`sdm plan --gpus {gpus} --gpu {gpu} --sequence-length {length}`"
    )


def _ways(config: TrainConfig) -> Iterator[TrainConfig]:
    """Block by block; and segment by segment, which takes less memory where states have a fixed size."""
    yield config
    if getattr(config.data, "layout", "") == "rows" and not config.unbounded_layers():
        yield replace(config, compute=replace(config.compute, checkpointing="segment"))


def _first_that_fits(config: TrainConfig, gpus: int, gpu: str) -> Mesh | None:
    model, device = config.model.build(config.model.vocab_size or 0), ACCELERATORS[gpu]
    assert isinstance(config.data, CorpusConfig)
    # Of a segment's activations there are those of one at a time.
    segments = config.compute.checkpointing == "segment"
    length = config.compute.segment_length if segments else config.data.sequence_length
    for mesh in sorted(_meshes(config, gpus, gpu), key=lambda mesh: (-mesh.data, mesh.channel, mesh.context)):
        work = Workload(model, mesh, length, config.data.batch_size, 1, "bfloat16", "block")
        if make_plan(work, device).fits:
            return mesh
    return None


def training(runs: Sequence[PaperRun], folder: Path, per_machine: int) -> list[Stage]:
    """Pre-training, then what starts from it."""
    stages = [
        Stage(title, tuple(_train(run, folder, per_machine) for run in runs if run.is_long is long))
        for title, long in (("Pre-training", False), ("Long-context fine-tuning", True))
    ]
    return [stage for stage in stages if stage.commands]


def measuring(runs: Sequence[PaperRun], folder: Path, text: Sequence[str], code: Sequence[str]) -> list[Stage]:
    """Of every model in its last form. `text` and `code` are what likelihoods are measured on."""
    names = {run.name for run in runs}
    last = [run for run in runs if f"{run.name}-long" not in names]
    memories = [
        run for run in last if "sdm" in (run.config.model.build(run.config.model.vocab_size or 0).layer_types or ())
    ]
    return [
        *_evaluations(last, folder, text, code),
        Stage("How memories are used", tuple(("sdm", "probe", str(folder / run.name)) for run in memories)),
        Stage(
            "Report",
            (("sdm", "report", *(str(folder / run.name) for run in runs), "--output", str(folder / "report")),),
        ),
        Stage(
            "Scaling laws, of all levels whose runs are in this folder: three or more",
            (
                (
                    "sdm",
                    "scaling",
                    *(str(folder / f"level-*-{name}") for name in LADDER),
                    *SCALING,
                    str(folder / "scaling"),
                ),
            ),
        ),
    ]


def _evaluations(runs: Sequence[PaperRun], folder: Path, text: Sequence[str], code: Sequence[str]) -> list[Stage]:
    models = [str(folder / run.name) for run in runs]
    lengths = [str(length) for length in LENGTHS]
    asked = {
        "Likelihood of text": ("nll", "--data", *text),
        "Likelihood by position in code": ("position", "--data", *code, "--length", str(2**20), "--join", "always"),
        "RULER": ("ruler", "--lengths", *lengths),
        "Short-context tasks; HumanEval+ runs programs that the model writes": (
            "harness",
            "--data-dir",
            TASKS,
            "--run-code",
        ),
    }
    return [
        Stage(title, tuple(("sdm", "eval", name, model, *options) for model in models))
        for title, (name, *options) in asked.items()
    ]


def _train(run: PaperRun, folder: Path, per_machine: int) -> tuple[str, ...]:
    machines = max(1, run.gpus // per_machine)
    start = ["torchrun", "--nnodes", str(machines), "--nproc-per-node", str(min(run.gpus, per_machine))]
    if machines > 1:
        start += ["--max-restarts", "3", "--rdzv-backend", "c10d"]
        start += ["--rdzv-endpoint", "$HEAD:29500", "--rdzv-id", run.name]
    return (*start, "-m", "sdm", "train", str(folder / run.name))


def shell(command: Sequence[str]) -> str:
    """A line of a shell script. $HEAD stays a variable, and the * in the last part of a path a pattern."""
    return " ".join(map(_word, command))


def _word(word: str) -> str:
    folder, _, name = word.rpartition("/")
    if "*" in name:
        return f"{shlex.quote(folder)}/{name}"
    return word if word.startswith("$HEAD") else shlex.quote(word)
