"""Tables in the terminal: one that is too wide for it is printed in parts, and no number is cut off."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

FIRST = 32  # characters of the first column, at most, where a table does not fit


def print_fitting(console: Console, *parts: RenderableType) -> None:
    """Tables and lines, one below the other."""
    for part in parts:
        console.print(*(fitting(part, console) if isinstance(part, Table) else (part,)))


def fitting(table: Table, console: Console) -> list[RenderableType]:
    """The table; or, if it is too wide, several, each with the first column and as many others as fit beside it, and
    the caption below all of them."""
    if len(table.columns) < 2 or _width(table, console) <= console.width:
        return [table]
    found: list[list[int]] = []
    for place in range(1, len(table.columns)):
        if not found or _width(_part(table, [*found[-1], place]), console) > console.width:
            found.append([0])
        found[-1].append(place)
    parts = [_part(table, places) for places in found]
    parts[0].title = table.title
    if not isinstance(table.caption, str):
        return [*parts]
    return [*parts, Text(table.caption, style="table.caption")]


def _part(table: Table, places: list[int]) -> Table:
    """Some of the columns."""
    columns = [table.columns[place].copy() for place in places]
    columns[0].max_width = None if columns[0].no_wrap else FIRST
    made = Table(*columns, box=table.box, padding=table.padding, title_justify=table.title_justify)
    for row in zip(*(list(table.columns[place].cells) for place in places), strict=True):
        made.add_row(*row)
    return made


def _width(table: Table, console: Console) -> int:
    """That it takes if no line is broken."""
    return Measurement.get(console, console.options.update(width=1000), table).maximum
