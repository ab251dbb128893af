"""Where tables go."""

from __future__ import annotations

from typing import Any

WIDTH = 80  # at least: in a narrower terminal wrapped lines keep the numbers that would be cut off


def console() -> Any:
    from rich.console import Console

    made = Console()
    made.width = max(made.width, WIDTH)
    return made


def show(*parts: Any) -> None:
    """Print tables and lines. A table that is wider than the terminal keeps its numbers whole."""
    from rich.measure import Measurement
    from rich.table import Table

    out = console()
    for part in parts:
        if isinstance(part, Table) and any(column.no_wrap for column in part.columns):
            out.width = max(out.width, Measurement.get(out, out.options.update(width=1000), part).maximum)
    out.print(*parts)
