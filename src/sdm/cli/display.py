"""The terminal: tables on standard output, messages of the library on standard error."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from sdm.evaluation.report import Table

WIDTH = 60  # at least: a narrower terminal breaks lines itself


def console() -> Console:
    """Return a console of at least `WIDTH` columns."""
    from rich.console import Console

    made = Console()
    made.width = max(made.width, WIDTH)
    return made


def show(*parts: RenderableType | Table) -> None:
    """Print tables and lines. A table that is wider than the terminal is printed in parts."""
    from sdm.analysis.tables import print_fitting

    print_fitting(console(), *parts)


def show_json(value: object) -> None:
    """Print a value as JSON. Numbers that JSON does not know (NaN, infinities) become null."""
    print(json.dumps(_plain(value), indent=2))


def tables_json(tables: Iterable[Table]) -> list[dict[str, object]]:
    """Return tables as JSON, with the text of their cells, for what has no numbers of its own."""
    return [
        {"title": table.title, "columns": list(table.columns), "rows": [list(row) for row in table.rows]}
        for table in tables
    ]


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TerminalHandler(logging.Handler):
    """Writes log records to standard error: the message alone, with its level from warnings on.

    Standard error is looked up for every record, so that lines appear above a live display that has replaced it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone; the command goes on
            print(f"{level}{self.format(record)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def logging_to_terminal() -> Iterator[None]:
    """Show what the library logs (logger "sdm") while a command runs.

    Records from INFO on are shown; of the processes of a distributed job other than the first, warnings only.
    `SDM_LOG=debug` (or warning, error) sets the level.
    """
    logger = logging.getLogger("sdm")
    default = "warning" if int(os.environ.get("RANK", "0")) else "info"
    level = logging.getLevelNamesMapping().get(os.environ.get("SDM_LOG", default).upper(), logging.INFO)
    handler = TerminalHandler()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # another library's handler on the root logger would print a second copy
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
