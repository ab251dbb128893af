"""The training loop.

    Trainer(config, Path("runs/mine")).run()

A run's folder that already holds checkpoints is continued from the newest good one, bit for bit on a CPU. Everything
that the next step depends on is in the parts of the trainer's state (`training/train_state.py`), and a checkpoint holds
all of them. `training/parallel.py` divides the work among the processes of a run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from sdm.data.batch import Batch, BatchSource
from sdm.data.config import CorpusConfig, TextConfig, open_data
from sdm.errors import TrainingError
from sdm.files import remove_leftovers
from sdm.layers.memory_statistics import evaluating
from sdm.models.causal_lm import causal_nll
from sdm.ranks import is_lost
from sdm.run import Run
from sdm.run.adapted_model import teacher_of
from sdm.run.checkpoint import CheckpointError, verify
from sdm.run.config import TrainConfig
from sdm.run.config_file import to_json
from sdm.run.export import check_replaceable, export_model
from sdm.run.folder import TOKENIZER
from sdm.run.model import load_weights, new_model
from sdm.signals import Interrupted, PostponedSignals, TrainingStopped, silence
from sdm.training import estimate
from sdm.training.guards import Guard
from sdm.training.monitor import STEP_TOKENS, MemoryMonitor, Monitor, NoMonitor, sample_text
from sdm.training.optimizer import create_moments, learning_rate_factor, make_optimizer, set_learning_rate
from sdm.training.parallel import check_rank_consistency, data_identity, process_identity, start
from sdm.training.train_state import (
    DataState,
    ModelState,
    OptimizerState,
    RandomState,
    StreamState,
    Throughput,
    load_state,
    split_state,
)

logger = logging.getLogger(__name__)


class Trainer:
    """Trains the model of a configuration in a run's folder.

    Args:
        config: the run.
        folder: the run's folder; it is created, or continued if it holds a run of this configuration.

    Raises:
        TrainingError: the run cannot start: another configuration, no memory, no device, or another process in it.
    """

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.config, self.folder, self.this_run = config, folder, Run(folder)
        self.parallel = start(config)
        self.ranks = self.parallel.ranks
        try:
            check_rank_consistency(self.ranks, process_identity(config))
            self._limit = self.ranks.on_rank0(self._claim)
            self._prepare()
            self._tokenizer_files = self.ranks.on_rank0(lambda: self.this_run.record(config, self.tokenizer))
        except OSError as error:
            self.close()
            raise TrainingError(f"the run in {folder} cannot start: {error}") from error
        except BaseException:
            self.close()
            raise

    def _claim(self) -> int | None:
        """Take possession of the folder. Returns the last step that the run may be continued from, if not any."""
        limit = self.this_run.claim(self.config)
        check_replaceable(self.this_run.export.resolve(), "--run-dir")
        remove_leftovers(self.this_run.export)
        return limit

    def _prepare(self) -> None:
        config = self.config
        if config.compute.threads is not None:
            torch.set_num_threads(config.compute.threads)
        self.device = self.parallel.device
        self.monitor: Monitor = (
            Monitor(self.this_run, config.monitor, config.schedule.steps) if self.ranks.first else NoMonitor()
        )
        self.data = self.ranks.local_rank0_first(lambda: self._open("train"))
        self.held_out = self.ranks.local_rank0_first(lambda: self._open("valid")) if self._validates() else None
        check_rank_consistency(self.ranks, data_identity(self.data, self.held_out))
        self.tokenizer = getattr(self.data, "tokenizer", None)
        if config.monitor.sample_every and (self.tokenizer is None or self.ranks.size > 1):
            reason = "the data is no text" if self.tokenizer is None else f"there are {self.ranks.size} processes"
            raise TrainingError(f"monitor.sample_every cannot be served, because {reason}; set it to 0")
        if config.adapt is None:
            eos_id = None if self.tokenizer is None else self.tokenizer.eos_id
            model_config = config.model.build(self.data.vocab_size, eos_id)
            needs = lambda: estimate.check_memory(config, model_config, self.data, self.device, self.parallel.mesh)  # noqa: E731
            self._info(self.ranks.gather_call(needs)[0])

        self.model = self._build()
        if config.adapt is not None:
            self.teacher = teacher_of(config.adapt, self.model)  # a frozen base to distill from
            trained = sum(x.numel() for x in self.model.parameters() if x.requires_grad)
            self._info(f"{trained:,} of {sum(x.numel() for x in self.model.parameters()):,} parameters are trained")
        self._pieces = self.parallel.pieces(self.data.batch_size, config.compute.accumulation)
        self.streams = StreamState(self.model, self._pieces, self.data.batch_size, self.parallel)
        self.parallel.shard(self.model)
        adapted_lr = None if config.adapt is None else config.adapt.base_lr
        self.optimizer = make_optimizer(self.model, config.optim, adapted_lr)
        create_moments(self.optimizer)
        self.weights = ModelState(self.model, self.parallel)
        self.position = DataState(self.data)
        self.guard = Guard(config.guard)
        self.throughput = Throughput()
        self.state: dict[str, Stateful] = {
            "model": self.weights,
            "optimizer": OptimizerState(self.model, self.optimizer, self.parallel),
            "data": self.position,
            "stream_state": self.streams,
            "guard": self.guard,
            "random": RandomState(self.device),
            "throughput": self.throughput,
        }
        watched = math.ceil((config.monitor.memory_tokens or STEP_TOKENS) / self.parallel.mesh.shards)
        self.statistics = MemoryMonitor(watched, config.monitor.memory_weighted, self.parallel)
        self.store = self.this_run.checkpoints(config.checkpoint.keep, self.ranks, config.schedule.decay_start)
        self.signals = PostponedSignals(self._acknowledge)
        self.step, self._begun = 0, 0  # steps done, and the one that is being made
        self._streams_begin = True  # whether any row of the batch that is being computed begins a stream
        if config.monitor.display != "none":
            self._info(f"{self._duration()} for {config.schedule.steps} steps")

    def _build(self) -> Any:
        """The model with its initial weights. Ranks other than the first have none: they get those of the first."""
        torch.manual_seed(self.config.seed)
        with contextlib.nullcontext() if self.ranks.first else torch.device("meta"):
            model = new_model(self.config, self.data.vocab_size, self.tokenizer).train()
        if self.ranks.size == 1:
            torch.nn.Module.to(model, self.device)
        path, begun = self.config.init_from, self.ranks.on_rank0(self.this_run.has_begun)
        if path is not None and not begun:
            self.ranks.on_rank0(lambda: load_weights(model, path, self.tokenizer))
        if self.config.compute.checkpointing == "block":
            model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        if self.config.compute.compile:
            for module in [model.model] if self.ranks.size == 1 else model.model.layers:
                module.compile()
        return model

    def _duration(self) -> str:
        """The estimated duration of the run, in words."""

        def loss(piece: Batch) -> Tensor:
            with self._separate_streams():
                return self._loss(self.parallel.slice(piece), max(piece.num_targets, 1), 0)

        seconds = estimate.seconds_of_run(
            self.config, self.model, self.data, loss, max(len(self._pieces[0]), 1), len(self._pieces), self.ranks
        )
        return estimate.about(seconds)

    def _open(self, split: str) -> BatchSource:
        """One split of the data. A run that is continued keeps its tokenizer, whatever became of its source."""
        data, recorded = self.config.data, self.this_run.recorded_tokenizer()
        if isinstance(data, TextConfig) and recorded is not None:
            data = replace(data, tokenizer=str(recorded))
        return open_data(data, split, self.config.schedule.steps)

    def _validates(self) -> bool:
        data = self.config.data
        without = isinstance(data, CorpusConfig) and data.valid_fraction == 0
        return self.config.monitor.validation_batches > 0 and not without

    def run(self) -> Path:
        """Train to the last step and export the model.

        Returns:
            The folder of the export.

        Raises:
            TrainingStopped: the run ended before its last step; the message says why and how it is continued.
        """
        steps, checkpoint = self.config.schedule.steps, self.config.checkpoint
        try:
            with self.signals as signals:
                self.resume()
                while self.step < steps:
                    lost = self._advance()
                    if self.ranks.any(signals.received is not None or lost is not None):
                        self.save()
                        with _ending_all():
                            raise _stopped(self.step, signals.received, lost)
                    if self.step % checkpoint.every == 0 or self.step in (steps, self.config.schedule.decay_start):
                        self.save()
                return export_model(
                    self.model, self.tokenizer, self.this_run.export, self.ranks, self.weights.state_dict
                )
        except (OSError, CheckpointError) as error:
            raise TrainingStopped(f"stopped after step {self.step}: {error}") from error
        except RuntimeError as error:
            if self.ranks.size == 1 or not is_lost(error):
                raise
            raise TrainingStopped(
                f"rank {self.ranks.rank} has lost another one after step {self.step} ({str(error).splitlines()[0]}); "
                "torchrun says which. The same command continues from the last checkpoint"
            ) from error
        finally:
            self.close()

    def close(self) -> None:
        """End the display and release the folder to other processes."""
        if hasattr(self, "monitor"):  # it has not, if preparing failed early
            self.monitor.close()
        self.this_run.release()

    def _info(self, text: str) -> None:
        """Log a message on the first rank, unless the display is off."""
        if self.ranks.first and self.config.monitor.display != "none":
            logger.info("%s: %s", self.folder.name, text)

    def _acknowledge(self, name: str) -> None:
        """Log at once that a signal was received."""
        doing = f"finishing step {self._begun}" if self._begun else "saving"
        self._info(f"{name}: {doing}; again to end now")

    def _advance(self) -> BaseException | None:
        """Take a step and the measurements that are due after it.

        Returns:
            The error of a display whose output is gone, if there was one: the step is complete and can be saved.
        """
        monitor, step = self.config.monitor, self.step + 1
        last = step == self.config.schedule.steps
        log, memory, validate = (
            _due(step, every, last) for every in (monitor.log_every, monitor.memory_every, monitor.validate_every)
        )
        start = time.perf_counter()
        self._begun = step
        try:
            metrics = self.train_step(watch_memory=self._watches_memory(step))
            self.throughput.add(int(metrics.pop("tokens")), time.perf_counter() - start)
            if memory:
                metrics |= self.statistics.take()
            if validate:
                metrics |= self.validate()
            if self.tokenizer is not None and monitor.sample_every and _due(step, monitor.sample_every, last):
                self._info(f"a sample after step {step}: {sample_text(self.model, self.tokenizer, step)!r}")
        except _Interrupted:
            return None
        finally:
            self._begun = 0
        if log or memory or validate:
            left = (self.config.schedule.steps - step) * self.throughput.seconds / step
            metrics |= {
                "tokens_per_second": self.throughput.recent(),
                "seconds": self.throughput.seconds,
                "seconds_left": left,
            }
            try:
                self.monitor.log(step, metrics)
            except (OSError, SystemExit) as error:  # rich makes a SystemExit of a broken pipe
                silence(sys.stdout)
                return error
        return None

    def _watches_memory(self, step: int) -> bool:
        """Whether statistics that are due at this step or soon after it rest on its tokens."""
        monitor, steps = self.config.monitor, self.config.schedule.steps
        needed = math.ceil((monitor.memory_tokens or 1) / (self.data.batch_size * self.data.sequence_length))
        return any(_due(later, monitor.memory_every, later == steps) for later in range(step, step + needed))

    def train_step(self, watch_memory: bool = False) -> dict[str, float]:
        """Take one optimizer step.

        Args:
            watch_memory: collect the statistics of memories.

        Returns:
            The metrics of the step.
        """
        factor = learning_rate_factor(self.config.schedule, self.step)
        set_learning_rate(self.optimizer, factor)
        pieces = [self.parallel.draw(self.data, self.position.step, rows) for rows in self._pieces]
        num_targets = self._agree(pieces)
        self.position.step += 1
        loss, tokens = 0.0, 0
        before = [x.clone() for x in self.model.buffers()]
        for place, piece in enumerate(pieces):
            # With streams a step is completed: to undo it would take a copy of all their states.
            undoable = self.ranks.size == 1 and (piece.reset is None or place == 0)
            if self.signals.received is not None and undoable:
                self._undo(before)
                raise _Interrupted
            piece = piece.to(self.device)
            self.parallel.reduce_gradients(self.model, last=place == len(pieces) - 1)
            with self._explained(piece):
                counts = bool(self._pieces[place])
                with self.statistics.watch(self.model, counts) if watch_memory else contextlib.nullcontext():
                    piece_loss = self._loss(piece, num_targets, place)
                piece_loss.backward()
                loss += piece_loss.item()
            tokens += piece.num_tokens if self._pieces[place] else 0
        loss, total_tokens = self.parallel.sum(loss, tokens)
        norm = self.parallel.gradient_norm(self.model)
        # Before clipping, which would spread one gradient that is not finite to all.
        with _ending_all():
            self.guard.check(self.step + 1, loss, norm.item(), self.model, self._advice)
        self.parallel.clip_(list(self.model.parameters()), self.config.optim.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        metrics = {"loss": loss, "gradient_norm": norm.item(), "lr": factor * self.config.optim.lr}
        return metrics | {"tokens": total_tokens}

    def _agree(self, pieces: list[Batch]) -> int:
        """The number of targets of the whole batch; whether a stream begins in any row is stored for `_loss`."""
        begin = any(piece.reset is not None and bool(piece.reset.any()) for piece in pieces)
        targets, beginning = self.parallel.sum(sum(piece.num_targets for piece in pieces), begin)
        self._streams_begin = beginning > 0
        return int(targets)

    def _undo(self, buffers: list[Tensor]) -> None:
        """Undo the step that has begun."""
        self.optimizer.zero_grad(set_to_none=True)
        self.position.step -= 1
        for x, before in zip(self.model.buffers(), buffers, strict=True):
            x.copy_(before)

    def _loss(self, batch: Batch, num_targets: int, place: int) -> Tensor:
        """The loss of one piece of a batch; a stream's states are kept for the same piece of the next step."""
        compute = self.config.compute
        segment_length = compute.segment_length if compute.checkpointing == "segment" else None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=compute.precision == "bfloat16"):
            carry, before, begins = batch.reset is not None, None, None
            if batch.reset is not None:
                before, begins = self.streams.begin(place, batch.reset, self._streams_begin)
            tokens, adapt = (batch.input_ids, batch.targets, batch.cu_seqlens), self.config.adapt
            if adapt is None:
                total, after = self.model.nll(*tokens, before, carry, segment_length, begins=begins)
            else:
                distill = adapt.distill if self.model.training else 0.0  # held-out loss is the likelihood alone
                total, after = causal_nll(
                    self.model, *tokens, before, carry, begins, distill, adapt.distill_tokens, self.teacher
                )
            if carry and after is not None:
                self.streams.keep(place, after)
            return total / max(num_targets, 1)

    @contextlib.contextmanager
    def _explained(self, batch: Batch) -> Iterator[None]:
        """An op that fails because the run has diverged stops it like a loss that is not finite."""
        try:
            yield
        except (ValueError, RuntimeError) as error:
            # A single process can repeat what failed, one of several cannot.
            again = (lambda: self._loss(batch, 1, 0)) if self.ranks.size == 1 else None
            if not is_lost(error):
                self.guard.explain(self._begun or self.step + 1, error, self.model, again, self._advice)
            raise

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return the mean negative log-likelihood on held-out data, in nats per token; empty without such data."""
        if self.held_out is None:
            return {}
        count, (rows,) = self.config.monitor.validation_batches, self.parallel.pieces(self.held_out.batch_size)
        total, targets = 0.0, 0
        with evaluating(self.model), self._separate_streams([rows]):
            for step in range(min(count, self.held_out.num_steps or count)):
                batch = self.parallel.draw(self.held_out, step, rows)
                self._agree([batch])
                batch = batch.to(self.device)
                with self._explained(batch):
                    # The loss is divided by one, so that batches with more to predict weigh more.
                    total += self._loss(batch, 1, 0).item()
                targets += batch.num_targets
        total, all_targets = self.parallel.sum(total, targets)
        return {"valid/loss": total / max(all_targets, 1)}

    @contextlib.contextmanager
    def _separate_streams(self, pieces: list[range] | None = None) -> Iterator[None]:
        """Set the states of the training streams aside."""
        training, self.streams = self.streams, self.streams.fresh(pieces or self._pieces)
        try:
            yield
        finally:
            self.streams = training

    def save(self) -> Path:
        """Write a checkpoint of everything that the next step depends on.

        Returns:
            Its folder.
        """
        self.ranks.gather_call(lambda: self.guard.check_weights(self.step, self.model, self._advice))
        tensors, values = split_state(self.state)
        state = {"config": to_json(self.config), TOKENIZER: self._tokenizer_files, "train_state": values}
        # Weights that may have diverged must not push out good ones.
        healthy = self.guard.spikes == 0
        return self.store.save(self.step, tensors, state, healthy)

    def resume(self) -> None:
        """Continue from the newest good checkpoint, if there is one."""
        self.ranks.on_rank0(self.store.remove_leftovers)
        state = self.store.newest(self._restore, self._limit)
        self.monitor.rewind(self.step)
        if state is not None:
            self._info(f"continuing after step {self.step}")

    def _restore(self, state: dict[str, Any]) -> None:
        if "train_state" not in state:
            raise CheckpointError(f"the checkpoint {self.store.path(state['step'])} is not of a trainer")
        values = state["train_state"]
        changed = values["data"]["source"] != self.data.fingerprint
        if changed and self._limit is not None and getattr(self.config.data, "curriculum", False):
            raise TrainingError(
                "schedule.steps: the curriculum of this run's data follows the number of steps, so that a longer run "
                "would have seen other batches; train it from the start in another folder (--run-dir)"
            )
        load_state(self.state, values, self.store, state["step"])
        self.step = state["step"]

    def _advice(self) -> str:
        path = self._last_good()
        good = "There is no good checkpoint yet" if path is None else f"The last good checkpoint is {path}"
        return f"{good}; a lower optim.lr or a longer schedule.warmup may help, in a run of its own."

    def _last_good(self) -> Path | None:
        """The newest checkpoint that is whole and was not written amid spikes."""
        for path in map(self.store.path, reversed(self.store.steps())):
            with contextlib.suppress(CheckpointError):
                if verify(path)["train_state"]["guard"]["spikes"] == 0:
                    return path
        return None


class _Interrupted(Exception):
    """A signal arrived within a step, which was undone."""


@contextlib.contextmanager
def _ending_all() -> Iterator[None]:
    """A stop in this block is one of all ranks."""
    try:
        yield
    except TrainingStopped as stopped:
        stopped.of_all = True
        raise


def _stopped(step: int, received: Interrupted | None, lost: BaseException | None) -> TrainingStopped:
    why = str(received) if received is not None else f"the output is gone ({lost})"
    why = why if received is not None or lost is not None else "another rank ends"
    pipe = isinstance(lost, (BrokenPipeError, SystemExit)) and hasattr(signal, "SIGPIPE")
    code = received.exit_code if received is not None else 128 + signal.SIGPIPE if pipe else 1
    return TrainingStopped(f"{why}: stopped after step {step}, which is saved; the same command continues", code)


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)
