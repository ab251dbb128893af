from __future__ import annotations

import pytest

from sdm.evaluation.report import AnyChart, Chart, Grid, HeatMap, Point, Rows, Violin, Violins

BARE, CERTAIN = Point(1.0, 2.0), Point(1.0, 2.0, 1.5, 2.5)


def charts(point: Point | None) -> dict[str, AnyChart]:
    """A chart of every kind that has intervals, with one point or none."""
    chart = Chart("chart", "Chart", "x", "y", {"SDM": [] if point is None else [point]})
    return {
        "chart": chart,
        "rows": Rows("rows", "Rows", "x", {} if point is None else {"SDM": point}),
        "heat map": HeatMap("map", "Map", "x", "y", "loss", {} if point is None else {(8, 16): point}),
        "grid": Grid("grid", "Grid", [chart]),
    }


@pytest.mark.parametrize("kind", charts(None))
def test_a_chart_knows_whether_it_is_empty_and_has_intervals(kind: str) -> None:
    empty, bare, certain = (charts(point)[kind] for point in (None, BARE, CERTAIN))
    assert [chart.is_empty() for chart in (empty, bare, certain)] == [True, False, False]
    assert [chart.has_intervals() for chart in (empty, bare, certain)] == [False, False, True]
    assert certain.rows()[0][-2:] == (1.5, 2.5)
    assert len(certain.columns) == len(certain.rows()[0])
    assert "2" in certain.in_words()


def test_distributions_have_no_intervals_and_a_grid_asks_each_of_its_charts() -> None:
    violins = Violins("violins", "Keys", "share", {"SDM": Violin((1, 2, 1), 0.5, 0.4)})
    assert not violins.is_empty()
    assert not violins.has_intervals()
    assert violins.rows() == [("SDM", 0.5, 0.4)]
    mixed = Grid("mixed", "", [violins, Chart("chart", "", "x", "y", {"SDM": [CERTAIN]})])
    assert mixed.has_intervals()
    assert not Grid("bare", "", [violins, Chart("chart", "", "x", "y", {"SDM": [BARE]})]).has_intervals()
