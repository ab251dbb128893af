"""Tables in the terminal: one that is too wide is printed in parts, and no number is broken or cut off."""

from __future__ import annotations

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from sdm.evaluation.report import Table

FIRST = 32  # most characters of the first column, where a table does not fit


def rich_table(table: Table) -> RichTable:
    """Convert a table for the terminal. Numbers are not broken into lines."""
    made = RichTable(title=table.title, caption=table.caption or None, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for place, name in enumerate(table.columns):
        made.add_column(name, justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
    for row in table.rows:
        made.add_row(*row)
    return made


def print_fitting(console: Console, *parts: RenderableType | Table) -> None:
    """Print tables and lines, one below the other; tables that are too wide in parts."""
    for part in parts:
        shown = rich_table(part) if isinstance(part, Table) else part
        console.print(*(fitting(shown, console) if isinstance(shown, RichTable) else (shown,)))


def fitting(table: RichTable, console: Console) -> list[RenderableType]:
    """Split a table that is wider than the console.

    Returns:
        The table if it fits; else parts, each with the first column and as many others as fit beside it, and the
        caption below them.
    """
    if len(table.columns) < 2 or _width(table, console) <= console.width:
        return [table]
    groups: list[list[int]] = []
    for place in range(1, len(table.columns)):
        if not groups or _width(_part(table, [*groups[-1], place]), console) > console.width:
            groups.append([0])
        groups[-1].append(place)
    parts = [_part(table, places) for places in groups]
    parts[0].title = table.title
    if not isinstance(table.caption, str):
        return [*parts]
    return [*parts, Text(table.caption, style="table.caption")]


def _part(table: RichTable, places: list[int]) -> RichTable:
    """Copy some of the columns."""
    columns = [table.columns[place].copy() for place in places]
    columns[0].max_width = None if columns[0].no_wrap else FIRST
    made = RichTable(*columns, box=table.box, padding=table.padding, title_justify=table.title_justify)
    for row in zip(*(list(table.columns[place].cells) for place in places), strict=True):
        made.add_row(*row)
    return made


def _width(table: RichTable, console: Console) -> int:
    """Return the width that the table takes if no line is broken."""
    return Measurement.get(console, console.options.update(width=1000), table).maximum
