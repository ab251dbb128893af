"""What each process of `ranks.py` does. torchrun starts it:

    torchrun --nproc-per-node N benchmarks/_rank_jobs.py peaks FOLDER CASES
    torchrun --nproc-per-node N benchmarks/_rank_jobs.py speed FOLDER N[-kept] TURNS STEPS

The first rank prints JSON, a line for each case or turn.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sdm.data import CorpusConfig
from sdm.layers import SparseDeltaMemory
from sdm.models.model_config import ModelConfig
from sdm.ranks import leave
from sdm.reproduce.recipes.registry import recipe
from sdm.run.config import ComputeConfig, MonitorConfig, ScheduleConfig, TrainConfig
from sdm.run.mesh import MeshConfig
from sdm.training import Trainer
from sdm.training.parallel import local

VOCABULARY = 258  # bytes, and two tokens besides
QUIET = MonitorConfig(display="none", validation_batches=0, memory_every=0)


@dataclass(frozen=True)
class Case:
    """A step whose peak memory is measured, and planned."""

    name: str
    mesh: tuple[int, int, int]
    model: dict[str, Any]
    length: int
    checkpointing: str = "none"
    keep_weights: bool = False

    @property
    def rows(self) -> int:
        """One for each data rank."""
        return self.mesh[0]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def config(self, folder: Path) -> TrainConfig:
        text = folder / "text.txt"
        return TrainConfig(
            model=ModelConfig(**self.model),
            data=CorpusConfig(
                sources=(str(text),),
                layout="rows",
                sequence_length=self.length,
                batch_size=self.rows,
                cache_dir=folder / "cache",
            ),
            schedule=ScheduleConfig(steps=100, warmup=1),
            compute=ComputeConfig(
                checkpointing=self.checkpointing,  # type: ignore[arg-type]
                mesh=MeshConfig(*self.mesh, keep_weights=self.keep_weights),
                threads=1,
                device="cpu",
            ),
            monitor=QUIET,
        )


def peaks(folder: Path, cases: list[Case]) -> None:
    """Of two steps, on every rank: the growth of the process since before there was a model."""
    # What a process takes up once, whatever it computes: buffers of gloo, kernels, Python's modules.
    small = {"hidden_size": 64, "num_hidden_layers": 4, "num_slots": 64, "num_writes": 4, "num_reads": 4}
    _measure(folder, replace(cases[0], name="warm-up", model=small, length=64))
    for case in cases:
        said = _measure(folder, case)
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps({"name": case.name, "ranks": said}), flush=True)


def _measure(folder: Path, case: Case) -> list[dict[str, int]]:
    gc.collect()
    before = _status("VmRSS")
    trainer = Trainer(case.config(folder), folder / f"{case.name}-{'x'.join(map(str, case.mesh))}")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here: building it is no step
    for _ in range(2):
        trainer.train_step()
    own = {"peak": _status("VmHWM") - before, "tables": _tables(trainer)}
    said = trainer.ranks.gather_call(lambda: own)
    trainer.close()
    return said


def _tables(trainer: Trainer) -> int:
    """Bytes of M0, its moments, and the table of one row, in all memories of this rank."""
    total = 0
    for layer in trainer.model.modules():
        if isinstance(layer, SparseDeltaMemory):
            total += sum(x.nbytes for x in layer.start_state(1).tensors().values())
    for name, x in trainer.model.named_parameters():
        if name.endswith("initial_state"):
            moments = trainer.optimizer.state[x]
            total += sum(local(y).nbytes for y in (x.detach(), moments["exp_avg"], moments["exp_avg_sq"]))
    return total


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def speed(folder: Path, kind: str, turns: int, steps: int) -> None:
    """Steps of tiny-code with one thread, in turns: each begins when there is a file of its number."""
    config = recipe("tiny-code")
    mesh = MeshConfig(keep_weights=kind.endswith("kept"))
    config = replace(config, compute=replace(config.compute, threads=1, device="cpu", mesh=mesh), monitor=QUIET)
    name = f"speed-{kind}"
    trainer = Trainer(config, folder / name)
    trainer.train_step()
    for turn in range(turns):
        while not (folder / f"{name}-{turn}").exists():
            time.sleep(0.01)
        trainer.ranks.gather_call(lambda: None)
        wall, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            trainer.train_step()
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        said = trainer.ranks.gather_call(lambda busy=busy: busy)  # type: ignore[misc]
        if trainer.ranks.first:
            print(json.dumps({"wall": wall / steps, "busy": max(said) / steps}), flush=True)
    trainer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    action, place, *rest = sys.argv[1:]
    if action == "peaks":
        peaks(Path(place), [Case(**case) for case in json.loads(rest[0])])
    else:
        speed(Path(place), rest[0], *map(int, rest[1:]))
    leave()
