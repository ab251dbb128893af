"""`sdm eval recall`: accuracy of recall by the number of pairs or the length, and the size of the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdm.data.batch import IGNORED
from sdm.data.config import CorpusConfig, TextConfig
from sdm.errors import UserError, check_size
from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.measurement import Measurement, Pairs, Plan, Result, Unit
from sdm.evaluation.recall_tasks import (
    PAIRS,
    RETRIEVAL,
    TEXT_NEEDLE,
    Row,
    Size,
    Task,
    default_config,
    name_of,
    task_of,
    text_needle,
)
from sdm.evaluation.report import Chart, Point, Report, Table
from sdm.evaluation.statistics import proportion

__all__ = ["PAIRS", "Recall"]

AUTO = "auto"
ROWS = 4  # at a time
WHOLE_ANSWERS = (TEXT_NEEDLE, RETRIEVAL)  # tasks whose answers have several tokens
DEPTHS = 5  # parts of a row by which needles are told apart


@dataclass(frozen=True)
class Recall(Measurement):
    """Accuracy of recall by pairs or length, and the state's size: MQAR, last value wins, MAD, needles."""

    task: str = AUTO
    """auto: what a run was trained on, text-needle for models of text. Or recall, rebinding (a key is bound several
    times, the last value counts), needle, facts (of training), mqar, mad-TASK, text-needle, retrieval (of training)."""
    sizes: tuple[int, ...] = ()
    """Numbers of pairs, or lengths for needles; none: the task's own."""
    rows: int | None = None
    """Rows at each size; none: 1000 of MQAR and 1280 of MAD, as published, 100 of text and retrieval, and of the others
    as many as it takes to ask for 8192 values."""
    haystack: str = "code"
    """text-needle: the text around it: code (Python's standard library), text (State of the Union), or files."""
    seed: int = 1
    """Decides the rows."""

    def __post_init__(self) -> None:
        check_size(seed=self.seed, rows=1 if self.rows is None else self.rows)

    def plan(self, lm: EvalModel) -> Plan:
        """Choose the task and its sizes; a unit is a row."""
        task, trained = self._task(lm)
        for size in task.sizes:
            lm.check_length(size.length, f"choose smaller --sizes than {size.number}")
        states = {size.number: lm.state_elements(size.length) for size in task.sizes}
        units = [
            Unit(f"{task.name} {size.number}, row {number}", str(size.number), (size, number), cost=size.length)
            for size in task.sizes
            for number in range(self._rows(task, size))
        ]

        def measure(batch: Sequence[Unit]) -> Iterator[Result]:
            size: Size = batch[0].payload[0]
            fixed = {"task": task.name, "title": task.title, "axis": task.axis, "trained_on": trained}
            rows = ask(lm, task, size, [unit.payload[1] for unit in batch])
            for row in rows:
                yield fixed | {"size": size.number, "state": states[size.number]} | row

        return Plan(units, measure, {"task": task.name, **task.data}, batch=ROWS)

    def _task(self, lm: EvalModel) -> tuple[Task, str | None]:
        """The task, and what the model was trained on as far as that is known."""
        config = None if lm.run is None else lm.run.config().data
        trained = None if config is None else name_of(config)
        name = self.task
        if name == AUTO and (config is None or isinstance(config, TextConfig)):
            name = TEXT_NEEDLE
        if name == TEXT_NEEDLE:
            return text_needle(lm, self.haystack, self.sizes, self.seed), trained
        if config is None or isinstance(config, CorpusConfig) or name not in (AUTO, trained):
            config = default_config(name)
        task = task_of(config, self.sizes, self.seed)
        if task.vocab_size > lm.vocab_size:
            known = f"; it was trained on {trained}, which --task auto measures" if trained else ""
            takes = f"{lm.name} takes {lm.vocab_size}"
            raise UserError(f"--task: {task.name} has {task.vocab_size} tokens, but {takes}{known}")
        return task, trained

    def _rows(self, task: Task, size: Size) -> int:
        if self.rows is not None:
            return self.rows
        return task.rows or (100 if task.name == TEXT_NEEDLE else max(16, -(-8192 // size.answers)))

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        """Accuracy by size, with intervals and the size of the state."""
        by_size: dict[int, list[Result]] = {}
        for row in results.values():
            by_size.setdefault(row["size"], []).append(row)
        first = next(iter(results.values()))
        sizes = {str(size): _summed(rows) for size, rows in by_size.items()}
        return {
            **{key: first[key] for key in ("task", "title", "axis", "trained_on")},
            "accuracy": {size: entry["accuracy"] for size, entry in sizes.items()},
            "sizes": sizes,
        }

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        """Tables of accuracy by size and depth, and charts against size and state."""
        return recall_report(summaries)

    def pairs(self, results: Mapping[str, Result]) -> Pairs:
        """Accuracy of each row, by size."""
        pairs: Pairs = {}
        for key, row in results.items():
            pairs.setdefault(f"accuracy at {row['size']}", {})[key] = (row["right"] / row["asked"], row["asked"])
        return pairs


def ask(lm: EvalModel, task: Task, size: Size, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """How many answers of each row are right: the model's likeliest tokens."""
    rows = [task.row(size, number) for number in numbers]
    ids, targets = (torch.cat([getattr(row.batch, name) for row in rows]) for name in ("input_ids", "targets"))
    wanted = targets != IGNORED
    answers = lm.predict(ids, wanted)
    right = answers == targets[wanted]
    results = []
    start = 0
    for row in rows:
        place = slice(start, start + row.batch.num_targets)
        start = place.stop
        if task.name in WHOLE_ANSWERS:
            result = _whole_answers(right[place], row)
        else:
            result = {"right": int(right[place].sum()), "asked": row.batch.num_targets}
            if row.depth is not None:
                result["depths"] = [
                    [_part(x), int(y), 1] for x, y in zip(row.depth.tolist(), right[place], strict=True)
                ]
            if row.former is not None:
                result["former"] = int((answers[place].unsqueeze(-1) == row.former).any(-1).sum())
        results.append(result)
    return results


def _whole_answers(right: Tensor, row: Row) -> dict[str, Any]:
    """An answer is a stretch of tokens, and right if all of them are."""
    places = (row.batch.targets[0] != IGNORED).nonzero().squeeze(1)
    starts = (places.diff() > 1).nonzero().squeeze(1) + 1
    whole = [bool(answer.all()) for answer in right.tensor_split(starts)]
    result: dict[str, Any] = {"right": sum(whole), "asked": len(whole), "tokens": float(right.float().mean())}
    if row.depth is not None:
        result["depths"] = [[_part(float(row.depth[0])), result["right"], 1]]
    return result


def _part(depth: float) -> int:
    return min(int(depth * DEPTHS), DEPTHS - 1)


def _summed(rows: Sequence[Result]) -> dict[str, Any]:
    mean = proportion([row["right"] for row in rows], [row["asked"] for row in rows])
    summary = {
        "accuracy": mean.value,
        "low": mean.low,
        "high": mean.high,
        "asked": mean.asked,
        "rows": len(rows),
        "state": rows[0]["state"],
    }
    if "former" in rows[0]:
        summary["former"] = sum(row["former"] for row in rows) / mean.asked
    if "tokens" in rows[0]:
        summary["tokens"] = sum(row["tokens"] for row in rows) / len(rows)
    if "depths" in rows[0]:
        summary["depths"] = _by_depth([entry for row in rows for entry in row["depths"]])
    return summary


def _by_depth(entries: Sequence[Sequence[int]]) -> dict[str, Any]:
    parts = {}
    for part in range(DEPTHS):
        right, asked = ([entry[place] for entry in entries if entry[0] == part] for place in (1, 2))
        if asked:
            mean = proportion(right, asked)
            parts[str(part)] = {"accuracy": mean.value, "low": mean.low, "high": mean.high, "asked": mean.asked}
    return parts


def recall_report(summaries: Mapping[str, dict[str, Any]]) -> Report:
    """Of several models the ones with the first one's task; those of others have tables of their own."""
    tables, charts = [], []
    for task in dict.fromkeys(summary["task"] for summary in summaries.values()):
        same = {name: summary for name, summary in summaries.items() if summary["task"] == task}
        tables += _tables(same)
        charts += _charts(same, task)
    return Report(tables, charts)


def _tables(summaries: Mapping[str, dict[str, Any]]) -> list[Table]:
    first = next(iter(summaries.values()))
    letter = "K" if first["axis"].startswith("pairs") else "T"
    sizes = sorted({int(size) for summary in summaries.values() for size in summary["sizes"]})
    rows = []
    for name, summary in summaries.items():
        cells = [_cell(summary["sizes"].get(str(size))) for size in sizes]
        rows.append((name, *cells, _state(summary)))
        if any("former" in entry for entry in summary["sizes"].values()):
            share = (summary["sizes"].get(str(size), {}).get("former") for size in sizes)
            rows.append(("  a former value instead", *(_percent(value) for value in share), ""))
    by = "the number of pairs K" if letter == "K" else "the length T in tokens"
    notes = [f"±: 95% interval. {_not_trained(summaries)}".strip()]
    columns = ("model", *(f"{letter}={size}" for size in sizes), "state")
    tables = [Table(f"{first['title']}: accuracy (%) by {by}", columns, rows, " ".join(notes))]
    depths = _depths(summaries, sizes[-1])
    return [*tables, depths] if depths else tables


def _depths(summaries: Mapping[str, dict[str, Any]], size: int) -> Table | None:
    rows, parts = [], 0
    for name, summary in summaries.items():
        depths = summary["sizes"].get(str(size), {}).get("depths")
        if depths:
            parts = max(parts, *(int(part) + 1 for part in depths))
            rows.append((name, depths))
    if not rows:
        return None
    columns = ("model", *(f"{part / parts:.0%}-{(part + 1) / parts:.0%}" for part in range(parts)))
    cells = [(name, *(_cell(depths.get(str(part))) for part in range(parts))) for name, depths in rows]
    return Table(f"By the place of the needle, T={size}", columns, cells)


def _charts(summaries: Mapping[str, dict[str, Any]], task: str) -> list[Chart]:
    first = next(iter(summaries.values()))
    curves = {
        name: [
            Point(int(size), entry["accuracy"], entry["low"], entry["high"])
            for size, entry in sorted(summary["sizes"].items(), key=lambda pair: int(pair[0]))
        ]
        for name, summary in summaries.items()
    }
    charts = [Chart(f"{task}-accuracy", first["title"], first["axis"], "accuracy", curves, log_x=True, percent=True)]
    letter = "K" if first["axis"].startswith("pairs") else "T"
    by_state: dict[str, list[Point]] = {}
    for size in sorted({int(size) for summary in summaries.values() for size in summary["sizes"]}):
        entries = [summary["sizes"][str(size)] for summary in summaries.values() if str(size) in summary["sizes"]]
        points = [
            Point(entry["state"], entry["accuracy"], entry["low"], entry["high"]) for entry in entries if entry["state"]
        ]
        if len({point.x for point in points}) > 1:
            by_state[f"{letter} = {size}"] = sorted(points, key=lambda point: point.x)
    label = "state behind a row (numbers)"
    charts.append(Chart(f"{task}-state", first["title"], label, "accuracy", by_state, log_x=True, percent=True))
    return charts


def _cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    margin = 100 * (entry["high"] - entry["low"]) / 2
    return f"{100 * entry['accuracy']:.1f} ±{margin:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _state(summary: Mapping[str, Any]) -> str:
    """Of the largest size; attention's grows with the length."""
    largest = summary["sizes"][max(summary["sizes"], key=int)]
    return f"{largest['state']:,}" if largest["state"] else "?"


def _not_trained(summaries: Mapping[str, dict[str, Any]]) -> str:
    others = [
        f"{name} on {summary['trained_on']}"
        for name, summary in summaries.items()
        if summary["trained_on"] not in (None, summary["task"]) and summary["task"] != "text-needle"
    ]
    return f"Trained on something else: {', '.join(others)}." if others else ""
