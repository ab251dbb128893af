"""What the findings have in common: curves over seeds, figures with their numbers, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from sdm.analysis.pages import Illustration, Verdict
from sdm.analysis.plots import Point, position_points
from sdm.evaluation.statistics import Mean
from sdm.reproduce.studies.mini.cells import Variant
from sdm.reproduce.studies.mini.results import Cells

NOT_YET = "not measured yet"
BANDS = "Bands: 95% intervals over seeds."
PAIRED = "Differences are paired by document and seed; ±: 95% interval over documents or over seeds, the wider one"
Curves = dict[str, list[Point]]


def point(x: float, mean: Mean) -> Point:
    return Point(x, mean.value, mean.low, mean.high)


def position_curve(cells: Cells, variant: Variant, quantity: str = "nll") -> list[Point]:
    """By position, the mean over seeds; empty if there is none."""
    summaries = cells.summaries(variant)
    places = position_points(summaries[0]["positions"], quantity) if summaries else []
    curve = []
    for number, place in enumerate(places):
        mean = cells.mean(variant, lambda summary, number=number: summary["positions"][number][quantity])  # type: ignore[misc]
        assert mean is not None
        curve.append(point(place.x, mean))
    return curve


def illustration(
    name: str, caption: str, figure: Figure, curves: Mapping[str, Sequence[Point]], x: str, y: str
) -> Illustration:
    """A figure of curves with their numbers."""
    rows = [(model, one.x, one.y, one.low, one.high) for model, points in curves.items() for one in points]
    ends = (f"{model} from {points[0].y:.3g} to {points[-1].y:.3g}" for model, points in curves.items() if points)
    return Illustration(name, caption, figure, ("model", x, y, "low", "high"), rows, f"{y}: {'; '.join(ends)}.")


def verdict(agreements: Sequence[bool | None], missing: Sequence[str]) -> Verdict:
    """Of several directions, each as in the paper (True), not so (False) or not known (None). What is not finished
    leaves open what agrees so far."""
    if not agreements:
        return "missing"
    if any(one is False for one in agreements):
        return "differs"
    return "unclear" if missing or None in agreements else "agrees"


def why(missing: Sequence[str]) -> str:
    return f"Not finished: {'; '.join(missing)}." if missing else ""
