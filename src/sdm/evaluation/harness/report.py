"""What is made of the answers: metrics of each task, and the table of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdm.evaluation.harness.tasks import PAPER
from sdm.evaluation.intervals import weighted_mean
from sdm.evaluation.measurement import Result
from sdm.evaluation.report import Report, Table
from sdm.evaluation.shares import wilson


def harness_summary(results: Mapping[str, Result]) -> dict[str, Any]:
    """Metrics by task. In a group all questions weigh the same, as in the harness's MMLU; its parts are there too."""
    by_task: dict[str, list[Result]] = {}
    by_part: dict[str, dict[str, list[Result]]] = {}
    for one in results.values():
        by_task.setdefault(one["task"], []).append(one)
        by_part.setdefault(one["task"], {}).setdefault(one["part"], []).append(one)
    tasks = {}
    for task, found in by_task.items():
        parts = by_part[task]
        tasks[task] = {"questions": len(found), "metrics": _metrics(found)}
        if list(parts) != [task]:
            tasks[task]["parts"] = {
                part: {"questions": len(some), "metrics": _metrics(some)} for part, some in parts.items()
            }
    return {"tasks": tasks, "average": _average(tasks)}


def _metrics(results: Sequence[Result]) -> dict[str, Any]:
    values: dict[str, list[Any]] = {}
    how: dict[str, str] = {}
    for one in results:
        how |= one["aggregation"]
        for metric, value in one["metrics"].items():
            values.setdefault(metric, []).append(value)
    found = {}
    for metric, entries in values.items():
        if metric in how:
            found[metric] = {"value": _put_together(how[metric], entries), "low": None, "high": None}
        else:
            mean = weighted_mean(entries)
            # Student's interval of few zeros and ones would leave what is possible, or be a point.
            shares = all(0 <= value <= 1 for value in entries)
            low, high = wilson(mean.value, mean.count) if shares else (mean.low, mean.high)
            found[metric] = {"value": mean.value, "low": low, "high": high}
    return found


def _put_together(name: str, values: list[Any]) -> float:
    from lm_eval.api.registry import get_aggregation

    return float(get_aggregation(name)([tuple(value) if isinstance(value, list) else value for value in values]))


def main_metric(task: str, metrics: Mapping[str, Any]) -> str:
    """What stands for a task: of the paper's the one of `PAPER`, else the first accuracy, else the first."""
    if task in PAPER and PAPER[task].metric in metrics:
        return PAPER[task].metric
    likely = [metric for metric in metrics if metric.startswith(("acc", "exact_match", "pass"))]
    return likely[0] if likely else next(iter(metrics))


def _average(tasks: Mapping[str, Any]) -> float | None:
    """Of the paper's tasks, if all of them are there."""
    if not PAPER.keys() <= tasks.keys():
        return None
    return sum(tasks[task]["metrics"][main_metric(task, tasks[task]["metrics"])]["value"] for task in PAPER) / len(
        PAPER
    )


def harness_report(summaries: Mapping[str, dict[str, Any]]) -> Report:
    """A row per task and metric, a column per model; the metric that stands for the task comes first."""
    tasks = list(dict.fromkeys(task for summary in summaries.values() for task in summary["tasks"]))
    rows = []
    for task in tasks:
        found = {name: summary["tasks"].get(task) for name, summary in summaries.items()}
        metrics: dict[str, None] = {}
        for one in found.values():
            metrics |= dict.fromkeys(one["metrics"] if one else ())
        main = main_metric(task, metrics)
        for metric in sorted(metrics, key=lambda name: name != main):
            cells = [_cell(one["metrics"].get(metric)) if one else "" for one in found.values()]
            title = PAPER[task].title if task in PAPER else task
            rows.append((title if metric == main else "", metric, *cells, _questions(found) if metric == main else ""))
    averages = [summary["average"] for summary in summaries.values()]
    if any(value is not None for value in averages):
        rows.append(("Average accuracy", "", *("" if x is None else f"{100 * x:.2f}" for x in averages), ""))
    columns = ("task", "metric", *summaries, "questions")
    caption = "In percent, perplexities aside. ±: 95% interval of the mean over questions."
    return Report([Table("Short-context tasks", columns, rows, caption)])


def _cell(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return ""
    if one["low"] is None:
        return f"{100 * one['value']:.2f}" if 0 <= one["value"] <= 1 else f"{one['value']:.4g}"
    return f"{100 * one['value']:.2f} ±{100 * (one['high'] - one['low']) / 2:.2f}"


def _questions(found: Mapping[str, Any]) -> str:
    counts = dict.fromkeys(f"{one['questions']:,}" for one in found.values() if one)
    return " / ".join(counts)
