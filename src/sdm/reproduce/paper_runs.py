"""Which runs the paper's experiments at a level of its ladder take, each as a configuration.

every level     SDM, GDN and full attention; the mixed hybrid at levels 1 to 8
level 6         memories of a quarter and a sixteenth of the slots (the paper's 432, 108 and 27 MB a layer)
level 8         Mamba2; SDM from a null M0, GDN from a learned state; W = 32, 64 with R = 32, 64, 128
levels 8, 13    fine-tuning on 131,072 tokens, 4 and 16 billion in all, of what is measured after it
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sdm.data.config import CorpusConfig
from sdm.errors import UserError
from sdm.models.ladder import LEVELS
from sdm.reproduce.recipes.ladder import BATCH_TOKENS, ladder
from sdm.reproduce.recipes.long_context import LENGTH, PAPER_TOKENS, lengthen, paper_steps
from sdm.run.config import TrainConfig

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
        yield _run(name, "ladder", level, layer)
    if level in MIXED_LEVELS:
        yield _run("mixed", "ladder", level, "sdm", global_layer=MIXED)
    if level == MEMORY_LEVEL:
        slots = _slots(level)
        for share in SLOT_SHARES:
            yield _run(f"sdm-slots-{slots // share}", "memory size", level, "sdm", num_slots=slots // share)
    if level == ABLATED_LEVEL:
        yield _run("mamba2", "ladder", level, "mamba2")
        yield _run("sdm-null", "initial state", level, "sdm", learned_initial_state=False)
        yield _run("gdn-learned", "initial state", level, "gdn", gdn_learned_initial_state=True)
        for writes, reads in itertools.product(WRITES, READS):
            if (writes, reads) != (64, 64):  # the ladder's own
                name = f"sdm-w{writes}-r{reads}"
                yield _run(name, "writes and reads", level, "sdm", num_writes=writes, num_reads=reads)


def _run(name: str, purpose: Purpose, level: int, layer: str, **fields: Any) -> PaperRun:
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
