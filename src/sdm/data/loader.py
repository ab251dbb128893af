"""The batches of one rank, step after step, and where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sdm.data.batch import Batch, BatchSource
from sdm.data.config import DataConfig
from sdm.data.errors import DataError
from sdm.data.splits import SPLITS
from sdm.errors import check_not_negative, check_size


def open_data(config: DataConfig, split: str = "train", total_steps: int | None = None) -> BatchSource:
    """The batches that a config describes.

    Args:
        config: of a corpus or of a synthetic task.
        split: "train", or one of the held-out "valid" and "test". A held-out corpus ends after one epoch.
        total_steps: of the whole training, for curricula.
    """
    if split not in SPLITS:
        raise DataError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if not isinstance(config, DataConfig):
        raise DataError(f"config must be a CorpusConfig or that of a synthetic task, got {type(config).__name__}")
    return config.open(split, total_steps)


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
