"""Write a page as files: report.html, and beside it every figure as PNG and SVG and its data as CSV."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from sdm.analysis.draw import draw, render
from sdm.analysis.pages.markup import Drawn, distinct, document
from sdm.analysis.pages.page import Illustration, Page
from sdm.evaluation.report import Cell
from sdm.files import new_file

REPORT = "report.html"
LARGEST = 3_000_000  # bytes of the page


def write_page(page: Page, folder: Path) -> Path:
    """Write report.html and its files into a folder. Other files in the folder stay.

    All files are written in full before the first takes its name, so that a full disk leaves what was there. A figure
    that cannot be drawn is shown as its error.

    Returns:
        The path of report.html.
    """
    drawn = _draw_all(page)
    text = _fitting(page, drawn)
    files = {REPORT: text} | {name: data for picture in drawn.values() for name, data in picture.files.items()}
    with _made_folders(*{(folder / name).parent for name in files}), contextlib.ExitStack() as stack:
        for name, data in files.items():  # the last takes its name first: the page comes after what it links to
            stack.enter_context(new_file(folder / name)).write_bytes(data)
    return folder / REPORT


def _draw_all(page: Page) -> dict[int, Drawn]:
    """Draw all illustrations, by their identity."""
    taken: set[str] = set()
    drawn: dict[int, Drawn] = {}
    for illustration in (picture for finding in page.findings for picture in finding.illustrations):
        if id(illustration) not in drawn:
            drawn[id(illustration)] = _draw(illustration, distinct(illustration.name, taken))
    return drawn


def _draw(illustration: Illustration, stem: str) -> Drawn:
    files = {f"data/{stem}.csv": csv_text(illustration.columns, illustration.rows).encode(errors="backslashreplace")}
    try:
        figure = illustration.figure if isinstance(illustration.figure, Figure) else draw(illustration.figure)
        made = {kind: render(figure, kind) for kind in ("svg", "png")}
    except Exception as error:  # of whatever kind: the rest of the page does not depend on it
        return Drawn(stem, files, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return Drawn(stem, files | {f"figures/{stem}.{kind}": data for kind, data in made.items()})


def _fitting(page: Page, drawn: dict[int, Drawn]) -> bytes:
    """Return the page with figures as SVG; while it is too large, the largest become PNG where that is smaller."""
    while True:
        text = document(page, drawn).encode()
        if len(text) <= LARGEST:
            return text
        gains = {
            key: len(picture.shown) - len(picture.files[f"figures/{picture.stem}.png"])
            for key, picture in drawn.items()
            if not picture.fault and picture.kind == "svg"
        }
        key = max(gains, key=gains.__getitem__, default=None)
        if key is None or gains[key] <= 0:
            return text
        drawn[key].kind = "png"


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table as CSV that a spreadsheet takes for data, whatever the text in it."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_cell, columns))
    writer.writerows([_cell(value) for value in row] for row in rows)
    return file.getvalue()


def _cell(value: Cell) -> Cell:
    """Keep all digits of numbers, and mark text that a spreadsheet would take for a formula as text."""
    if isinstance(value, str) and re.match(r"[=+@\t\r]|-(?![\d.])", value):
        return f"'{value}"
    return "" if value is None else value


@contextlib.contextmanager
def _made_folders(*folders: Path) -> Iterator[None]:
    """Make folders for a block; if it fails, remove those that were not there before and are empty."""
    new = sorted({part for folder in folders for part in (folder, *folder.parents) if not part.exists()}, reverse=True)
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
