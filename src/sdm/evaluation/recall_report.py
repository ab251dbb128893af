"""What `sdm eval recall` shows: accuracy against pairs or length, against the state's size, and by depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdm.evaluation.report import Chart, Point, Report, Table


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
        if any("former" in one for one in summary["sizes"].values()):
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
        found = summary["sizes"].get(str(size), {}).get("depths")
        if found:
            parts = max(parts, *(int(part) + 1 for part in found))
            rows.append((name, found))
    if not rows:
        return None
    columns = ("model", *(f"{part / parts:.0%}-{(part + 1) / parts:.0%}" for part in range(parts)))
    cells = [(name, *(_cell(found.get(str(part))) for part in range(parts))) for name, found in rows]
    return Table(f"By the place of the needle, T={size}", columns, cells)


def _charts(summaries: Mapping[str, dict[str, Any]], task: str) -> list[Chart]:
    first = next(iter(summaries.values()))
    curves = {
        name: [
            Point(int(size), one["accuracy"], one["low"], one["high"])
            for size, one in sorted(summary["sizes"].items(), key=lambda entry: int(entry[0]))
        ]
        for name, summary in summaries.items()
    }
    charts = [Chart(f"{task}-accuracy", first["title"], first["axis"], "accuracy", curves, log_x=True, percent=True)]
    letter = "K" if first["axis"].startswith("pairs") else "T"
    by_state: dict[str, list[Point]] = {}
    for size in sorted({int(size) for summary in summaries.values() for size in summary["sizes"]}):
        found = [summary["sizes"][str(size)] for summary in summaries.values() if str(size) in summary["sizes"]]
        points = [Point(one["state"], one["accuracy"], one["low"], one["high"]) for one in found if one["state"]]
        if len({point.x for point in points}) > 1:
            by_state[f"{letter} = {size}"] = sorted(points, key=lambda point: point.x)
    label = "state behind a row (numbers)"
    charts.append(Chart(f"{task}-state", first["title"], label, "accuracy", by_state, log_x=True, percent=True))
    return charts


def _cell(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return ""
    margin = 100 * (one["high"] - one["low"]) / 2
    return f"{100 * one['accuracy']:.1f} ±{margin:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _state(summary: Mapping[str, Any]) -> str:
    """Of the largest size; attention's grows with the length."""
    largest = summary["sizes"][max(summary["sizes"], key=int)]
    return f"{largest['state']:,}" if largest["state"] else "?"


def _not_trained(summaries: Mapping[str, dict[str, Any]]) -> str:
    others = [
        f"{name} on {one['trained_on']}"
        for name, one in summaries.items()
        if one["trained_on"] not in (None, one["task"]) and one["task"] != "text-needle"
    ]
    return f"Trained on something else: {', '.join(others)}." if others else ""
