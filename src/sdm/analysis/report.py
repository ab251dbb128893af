"""Old names of `sdm.analysis.draw` and `sdm.analysis.tables`."""

from sdm.analysis.draw import draw, draw_all
from sdm.analysis.tables import rich_table

__all__ = ["draw", "draw_all", "rich_table"]
