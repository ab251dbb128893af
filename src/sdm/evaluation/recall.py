"""`sdm eval recall`: what a model can say again of what it was told, by how much that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sdm.data.batch import IGNORED
from sdm.data.config import CorpusConfig
from sdm.errors import UserError, check_size
from sdm.evaluation.measurement import Measurement, Pairs, Plan, Result, Unit
from sdm.evaluation.recall_report import recall_report
from sdm.evaluation.recall_tasks import PAIRS, TEXT_NEEDLE, Size, Task, default_config, name_of, task_of
from sdm.evaluation.report import Report
from sdm.evaluation.shares import share
from sdm.evaluation.state_size import state_elements
from sdm.evaluation.subject import Subject
from sdm.evaluation.text_needle import text_needle

__all__ = ["PAIRS", "Recall"]

AUTO = "auto"
ROWS = 4  # at a time
DEPTHS = 5  # parts of a row by which needles are told apart


@dataclass(frozen=True)
class Recall(Measurement):
    """Accuracy of recall by pairs or length, and the state's size: MQAR, last value wins, MAD, needles."""

    task: str = AUTO
    """auto: what a run was trained on, text-needle for models of text. Or recall, rebinding (a key is bound several
    times, the last value counts), needle, mqar, mad-TASK, synthetic-TASK, text-needle."""
    sizes: tuple[int, ...] = ()
    """Numbers of pairs, or lengths for needles; none: the task's own."""
    rows: int | None = None
    """Rows at each size; none: 1000 of MQAR and 1280 of MAD, as published, 100 of text, and of the others as many as it
    takes to ask for 8192 values."""
    haystack: str = "code"
    """text-needle: the text around it: code (Python's standard library), text (State of the Union), or files."""
    seed: int = 1
    """Decides the rows."""

    def __post_init__(self) -> None:
        check_size(seed=self.seed, rows=1 if self.rows is None else self.rows)

    def plan(self, subject: Subject) -> Plan:
        task, trained = self._task(subject)
        for size in task.sizes:
            subject.check_length(size.length, f"choose smaller --sizes than {size.number}")
        states = {size.number: state_elements(subject, size.length) for size in task.sizes}
        units = [
            Unit(f"{task.name} {size.number}, row {number}", str(size.number), (size, number), cost=size.length)
            for size in task.sizes
            for number in range(self._rows(task, size))
        ]

        def measure(batch: Sequence[Unit]) -> Iterator[Result]:
            size: Size = batch[0].payload[0]
            fixed = {"task": task.name, "title": task.title, "axis": task.axis, "trained_on": trained}
            found = ask(subject, task, size, [unit.payload[1] for unit in batch])
            for one in found:
                yield fixed | {"size": size.number, "state": states[size.number]} | one

        return Plan(units, measure, {"task": task.name, **task.data}, batch=ROWS)

    def _task(self, subject: Subject) -> tuple[Task, str | None]:
        """The task, and what the model was trained on as far as that is known."""
        config = None if subject.run is None else subject.run.config().data
        trained = None if config is None else name_of(config)
        name = self.task
        if name == AUTO and (config is None or isinstance(config, CorpusConfig)):
            name = TEXT_NEEDLE
        if name == TEXT_NEEDLE:
            return text_needle(subject, self.haystack, self.sizes, self.seed), trained
        if config is None or isinstance(config, CorpusConfig) or name not in (AUTO, trained):
            config = default_config(name)
        task = task_of(config, self.sizes, self.seed)
        if task.vocab_size > subject.vocab_size:
            known = f"; it was trained on {trained}, which --task auto measures" if trained else ""
            takes = f"{subject.name} takes {subject.vocab_size}"
            raise UserError(f"--task: {task.name} has {task.vocab_size} tokens, but {takes}{known}")
        return task, trained

    def _rows(self, task: Task, size: Size) -> int:
        if self.rows is not None:
            return self.rows
        return task.rows or (100 if task.name == TEXT_NEEDLE else max(16, -(-8192 // size.answers)))

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        by_size: dict[int, list[Result]] = {}
        for one in results.values():
            by_size.setdefault(one["size"], []).append(one)
        first = next(iter(results.values()))
        sizes = {str(size): _summed(found) for size, found in by_size.items()}
        return {
            **{key: first[key] for key in ("task", "title", "axis", "trained_on")},
            "accuracy": {size: one["accuracy"] for size, one in sizes.items()},
            "sizes": sizes,
        }

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        return recall_report(summaries)

    def pairs(self, results: Mapping[str, Result]) -> Pairs:
        found: Pairs = {}
        for key, one in results.items():
            found.setdefault(f"accuracy at {one['size']}", {})[key] = (one["right"] / one["asked"], one["asked"])
        return found


def ask(subject: Subject, task: Task, size: Size, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """How many answers of each row are the model's likeliest token; of a text, whether all of them are."""
    rows = [task.row(size, number) for number in numbers]
    ids, targets = (torch.cat([getattr(row.batch, name) for row in rows]) for name in ("input_ids", "targets"))
    wanted = targets != IGNORED
    answers = subject.predict(ids, wanted)
    right = answers == targets[wanted]
    found = []
    start = 0
    for row in rows:
        place = slice(start, start + row.batch.num_targets)
        start = place.stop
        if task.name == TEXT_NEEDLE:
            assert row.depth is not None
            one: dict[str, Any] = {
                "right": int(right[place].all()),
                "asked": 1,
                "tokens": float(right[place].float().mean()),
            }
            one["depths"] = [[_part(float(row.depth[0])), one["right"], 1]]
        else:
            one = {"right": int(right[place].sum()), "asked": row.batch.num_targets}
            if row.depth is not None:
                one["depths"] = [[_part(x), int(y), 1] for x, y in zip(row.depth.tolist(), right[place], strict=True)]
            if row.former is not None:
                one["former"] = int((answers[place].unsqueeze(-1) == row.former).any(-1).sum())
        found.append(one)
    return found


def _part(depth: float) -> int:
    return min(int(depth * DEPTHS), DEPTHS - 1)


def _summed(rows: Sequence[Result]) -> dict[str, Any]:
    found = share([one["right"] for one in rows], [one["asked"] for one in rows])
    summary = {
        "accuracy": found.value,
        "low": found.low,
        "high": found.high,
        "asked": found.asked,
        "rows": len(rows),
        "state": rows[0]["state"],
    }
    if "former" in rows[0]:
        summary["former"] = sum(one["former"] for one in rows) / found.asked
    if "tokens" in rows[0]:
        summary["tokens"] = sum(one["tokens"] for one in rows) / len(rows)
    if "depths" in rows[0]:
        summary["depths"] = _by_depth([entry for one in rows for entry in one["depths"]])
    return summary


def _by_depth(entries: Sequence[Sequence[int]]) -> dict[str, Any]:
    found = {}
    for part in range(DEPTHS):
        right, asked = ([entry[place] for entry in entries if entry[0] == part] for place in (1, 2))
        if asked:
            one = share(right, asked)
            found[str(part)] = {"accuracy": one.value, "low": one.low, "high": one.high, "asked": one.asked}
    return found
