"""Does the trainer cost anything, and does a long sequence cost more per token than a short one?

Two questions: the trainer's steps against the bare model's forward, backward and optimizer step on the same batches;
and one step on a sequence of 131072 tokens, its peak memory and its time per token against one of 8192.

    python benchmarks/training.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from _harness import Ratio, peak_memory, report, time_interleaved
from sdm.data import Batches, CorpusConfig, RecallConfig
from sdm.models import SDMForCausalLM
from sdm.models.model_config import ModelConfig
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, ScheduleConfig, TrainConfig
from sdm.training import Trainer
from sdm.training.optimizer import make_optimizer

LONG, SHORT = 131_072, 8192


def overhead(folder: Path) -> tuple[float, dict[str, float]]:
    """The trainer's tokens per second over the bare loop's, with logging and statistics on."""
    config = TrainConfig(
        model=ModelConfig(hidden_size=128, num_hidden_layers=4, num_slots=1024, num_writes=32, num_reads=32),
        data=RecallConfig(num_pairs=128, curriculum=False, batch_size=8),
        schedule=ScheduleConfig(steps=10_000),
        checkpoint=CheckpointConfig(every=10_000),
        monitor=MonitorConfig(display="none", log_every=10, memory_every=50, validation_batches=0),
    )
    trainer = Trainer(config, folder)
    torch.manual_seed(0)
    model = SDMForCausalLM(trainer.model.config).train()
    optimizer = make_optimizer(model, config.optim)
    batches = Batches(trainer.data)

    def bare() -> None:
        batch = next(batches)
        hidden = model.model(input_ids=batch.input_ids).last_hidden_state
        wanted = batch.targets != -100
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), batch.targets[wanted])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    times = time_interleaved({"bare": bare, "trainer": trainer._advance}, seconds=60)
    trainer.close()
    return times["bare"] / times["trainer"], times


def long_step(length: int) -> None:
    """In a process of its own: prints the seconds of a step and the peak memory in bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = "".join(f"line {number} of a long text about memory\n" for number in range(length // 16))
        (folder / "text.txt").write_text(text)
        config = TrainConfig(
            model=ModelConfig(hidden_size=256, num_hidden_layers=4, num_slots=4096, num_writes=64, num_reads=64),
            data=CorpusConfig(
                sources=(str(folder / "text.txt"),),
                layout="rows",
                sequence_length=length,
                batch_size=1,
                cache_dir=folder / "cache",
            ),
            schedule=ScheduleConfig(steps=100, warmup=1),
            compute=ComputeConfig(checkpointing="segment", segment_length=2048),
            monitor=MonitorConfig(display="none", validation_batches=0, memory_every=0),
        )
        trainer = Trainer(config, folder / "run")
        times = []
        for _ in range(max(1, 2 * SHORT // length) + 1):
            start = time.perf_counter()
            trainer.train_step()
            times.append(time.perf_counter() - start)
        trainer.close()
    print(min(times), peak_memory())


def run_long_step(length: int) -> tuple[float, float]:
    done = subprocess.run([sys.executable, __file__, str(length)], capture_output=True, text=True, check=True)
    seconds, peak = map(float, done.stdout.split()[-2:])
    return seconds, peak


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ratio, times = overhead(Path(folder))
    short, _ = run_long_step(SHORT)
    long, peak = run_long_step(LONG)
    report(
        "training",
        [
            Ratio("trainer's tokens/s over the bare step's", ratio, 0.95, at_least=True),
            Ratio(f"step of {LONG} tokens, peak memory in GB", peak / 1e9, 5.0),
            Ratio(f"time per token, {LONG} over {SHORT}", (long / LONG) / (short / SHORT), 1.15),
        ],
        {**times, f"step of {LONG} tokens": long, f"step of {SHORT} tokens": short},
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        long_step(int(sys.argv[1]))
    else:
        main()
