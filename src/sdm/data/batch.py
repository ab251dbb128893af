"""What a model is trained on at one step, who makes it, and which rows of it a rank iterates over.

Shapes: B rows, T time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sdm.constants import IGNORED
from sdm.data.randomness import fingerprint_of
from sdm.errors import DataError, check_not_negative, check_size


@dataclass(frozen=True)
class Batch:
    """Tokens and what to predict at each of them.

    targets[b,t] is the token to predict after input_ids[b,t], also at the end of a row, where the next token is known
    though the row does not hold it. They are not the `labels` of transformers, which a model shifts:
    `sdm.models.likelihood.nll` takes them as they are, and so does `model(input_ids, shift_labels=batch.targets)`.
    """

    input_ids: Tensor
    """[B,T] int64."""
    targets: Tensor
    """[B,T] int64, -100 where nothing is to be predicted."""
    cu_seqlens: Tensor | None = None
    """[documents + 1] int32 offsets of the documents packed into one row (then B = 1)."""
    reset: Tensor | None = None
    """[B] bool, for streams: True where a row starts anew; elsewhere it continues the same row of the step before."""

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2 or self.targets.shape != self.input_ids.shape:
            shapes = f"{list(self.input_ids.shape)} and {list(self.targets.shape)}"
            raise DataError(f"input_ids and targets must both be [B,T], got {shapes}")
        if self.cu_seqlens is not None and len(self.input_ids) != 1:
            raise DataError(f"cu_seqlens packs documents into one row, got {len(self.input_ids)} rows")
        if self.reset is not None and self.reset.shape != self.input_ids.shape[:1]:
            raise DataError(f"reset must be [B] = [{len(self.input_ids)}], got {list(self.reset.shape)}")

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.input_ids.numel()

    @property
    def num_targets(self) -> int:
        """How many positions have something to predict: what a summed loss is divided by."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return a copy of the batch on a device."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, non_blocking=non_blocking)

        input_ids = self.input_ids.to(device, non_blocking=non_blocking)
        targets = self.targets.to(device, non_blocking=non_blocking)
        return Batch(input_ids, targets, move(self.cu_seqlens), move(self.reset))


class BatchSource(Protocol):
    """Batches as a function of the step: nothing is remembered between two calls, so any step can come first."""

    @property
    def batch_size(self) -> int:
        """Rows of one step over all ranks."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a row, the longest one if it varies."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""

    @property
    def num_steps(self) -> int | None:
        """Steps after which everything has been seen once and the source ends; None if it goes on for ever."""

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes the batches."""

    def batch(self, step: int, rows: Sequence[int]) -> Batch:
        """The chosen rows of the global batch of this step."""


def ramp(start: int, end: int, step: int, total_steps: int) -> int:
    """From `start`, kept for a fifth of the steps, exponentially up to `end` at three fifths."""
    progress = step / total_steps
    if progress >= 3 / 5:
        return end
    return round(start * (end / start) ** (max(progress - 1 / 5, 0) / (2 / 5)))


class Growing(Protocol):
    """The configuration of a task that may grow."""

    @property
    def batch_size(self) -> int:
        """Rows of a step over all ranks."""

    @property
    def curriculum(self) -> bool:
        """Whether the rows grow."""


class CurriculumRows(BatchSource):
    """Rows that are drawn together, whoever wants some: it is cheap, and so no row depends on the number of ranks.
    Held-out splits are other rows, all of them of the full size."""

    num_steps = None

    def __init__(self, config: Growing, split: str = "train", total_steps: int | None = None) -> None:
        if split == "train" and config.curriculum and (total_steps is None or total_steps < 1):
            raise DataError("a curriculum needs total_steps, the steps of the whole training")
        self.config, self.split = config, split
        self._total_steps = total_steps if split == "train" and config.curriculum else None

    @property
    def batch_size(self) -> int:
        """Rows of a step over all ranks."""
        return self.config.batch_size

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that the batches depend on."""
        return fingerprint_of(self.config, self.split, self._total_steps)

    def grown(self, start: int, end: int, step: int) -> int:
        """A size at a step: `end`, unless the curriculum is still on its way there."""
        if self._total_steps is None or not self.config.curriculum:
            return end
        return ramp(start, end, step, self._total_steps)

    def draw(self, step: int) -> tuple[Batch, int]:
        """All rows of a step, and how many of them stand in the place of one."""
        raise NotImplementedError

    def batch(self, step: int, rows: Sequence[int]) -> Batch:
        """Return the chosen rows of a step, each with the short rows that take its place."""
        batch, short = self.draw(step)
        chosen = (torch.tensor(rows).unsqueeze(-1) * short + torch.arange(short)).flatten()
        return Batch(batch.input_ids[chosen], batch.targets[chosen])


def rows_of_rank(batch_size: int, rank: int, ranks: int) -> range:
    """Return the rows of a global batch that a rank computes.

    Ranks have consecutive rows, as torch's `Shard(0)` divides a tensor: all the same number but for the last ones,
    which may have fewer or none. The ranks together see the same rows in the same steps, whatever their number.
    """
    each = -(-batch_size // ranks)
    return range(batch_size)[rank * each : (rank + 1) * each]


class Batches(Iterator[Batch]):
    """Iterates over the rows of one rank, from a step on."""

    def __init__(self, source: BatchSource, rank: int = 0, world_size: int = 1, step: int = 0) -> None:
        check_size(world_size=world_size)
        check_not_negative(step=step)
        if not 0 <= rank < world_size:
            raise DataError(f"rank must be between 0 and world_size - 1 = {world_size - 1}, got {rank}")
        if source.batch_size % world_size:
            raise DataError(f"batch_size = {source.batch_size} must be divisible by world_size = {world_size}")
        self.source, self.step = source, step
        self._rows = rows_of_rank(source.batch_size, rank, world_size)

    def __next__(self) -> Batch:
        if self.source.num_steps is not None and self.step >= self.source.num_steps:
            raise StopIteration
        batch = self.source.batch(self.step, self._rows)
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The next step, and what the source is."""
        return {"step": self.step, "source": self.source.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, on any number of ranks. Nothing is replayed."""
        if state["source"] != self.source.fingerprint:
            raise DataError(
                "the data changed since this state was saved: its text, tokenizer, order, batch size or length; "
                "restore them, or start a new run"
            )
        self.step = state["step"]
