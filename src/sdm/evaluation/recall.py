"""`sdm eval recall`: accuracy of associative recall by the number of pairs to keep apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sdm.data.batch import IGNORED, Batch
from sdm.data.errors import check_positive
from sdm.data.recall import recall_batch
from sdm.data.task_config import RecallConfig
from sdm.errors import UserError
from sdm.evaluation.measurement import Measurement, Plan, Result, Unit
from sdm.evaluation.report import Chart, Point, Report, Table
from sdm.evaluation.scoring import likeliest
from sdm.evaluation.subject import Subject

PAIRS = (16, 32, 64, 128, 256, 512)
ROWS = 4  # at a time


@dataclass(frozen=True)
class Recall(Measurement):
    """Accuracy on the task that a run of this project's own recall was trained on, at several numbers of pairs."""

    pairs_to_recall: tuple[int, ...] = PAIRS
    """Numbers of pairs; those that the task has too few keys for are left out. If none is left: as many as it has."""
    queries: int = 8192
    """Values that are asked for at each, at least."""
    seed: int = 1
    """Of the rows."""

    def __post_init__(self) -> None:
        check_positive(queries=self.queries)

    def plan(self, subject: Subject) -> Plan:
        config = None if subject.run is None else subject.run.config().data
        if not isinstance(config, RecallConfig):
            raise UserError(f"recall: {subject.name} is no run that was trained on recall")
        task = config
        counts = [count for count in self.pairs_to_recall if count <= task.num_keys] or [task.num_keys]
        units = [Unit(f"{count} pairs", payload=count) for count in counts]

        def measure(batch: Sequence[Unit]) -> Iterator[Result]:
            for unit in batch:
                found = recall_accuracy(subject.model, task, [unit.payload], self.queries, self.seed)
                yield {"pairs": unit.payload, "accuracy": found[unit.payload]}

        return Plan(units, measure, {"num_keys": task.num_keys, "num_values": task.num_values})

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        return {"accuracy": {str(one["pairs"]): one["accuracy"] for one in results.values()}}

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        return accuracy_report("Associative recall", summaries)


def accuracy_report(title: str, summaries: Mapping[str, dict[str, Any]]) -> Report:
    """Accuracy against the number of pairs."""
    counts = sorted({int(count) for summary in summaries.values() for count in summary["accuracy"]})
    rows = []
    for name, summary in summaries.items():
        found = (summary["accuracy"].get(str(count)) for count in counts)
        rows.append((name, *("" if value is None else f"{100 * value:.1f}" for value in found)))
    curves = {
        name: [Point(int(count), value) for count, value in summary["accuracy"].items()]
        for name, summary in summaries.items()
    }
    columns = ("model", *(f"K={count}" for count in counts))
    return Report(
        [Table(f"{title}: accuracy (%) by the number of pairs K", columns, rows)],
        [Chart("recall", title, "pairs to keep apart (K)", "accuracy", curves, log_x=True, percent=True)],
    )


def recall_accuracy(
    model: Any, config: RecallConfig, pairs: Sequence[int], queries: int = 8192, seed: int = 1
) -> dict[int, float]:
    """For each K, the share of at least `queries` queried values that are the model's likeliest token."""
    accuracy = {}
    for count in pairs:
        generator = torch.Generator().manual_seed(1_000_003 * seed + count)
        right, asked = 0, 0
        while asked < queries:
            batch = recall_batch(replace(config, batch_size=ROWS), count, generator)
            right += count_right(model, batch)
            asked += batch.num_targets
        accuracy[count] = right / asked
    return accuracy


def count_right(model: Any, batch: Batch) -> int:
    """How many targets are the model's likeliest token."""
    wanted = batch.targets != IGNORED
    return int((likeliest(model, batch.input_ids, wanted) == batch.targets[wanted]).sum())
