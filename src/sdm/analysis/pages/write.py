"""Write a page as files: report.html, and beside it every figure as PNG and SVG and its data as CSV."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

import sdm
from sdm.analysis.draw import draw, render
from sdm.analysis.pages.markup import Drawn, distinct, document
from sdm.analysis.pages.page import Illustration, Page, Section
from sdm.evaluation.report import Cell, Table
from sdm.evaluation.results import versions
from sdm.files import new_file
from sdm.native import core

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


ROOT = Path(sdm.__file__).parents[2]


def environment_section() -> Section:
    """Make the section of a page that shows the environment."""
    return Section("Environment", tables=(Table("", ("what", "here"), list(environment().items())),))


def environment() -> dict[str, str]:
    """Return what is known of the environment, by name, ready to read."""
    return versions() | {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": _memory(),
        "threads of a process": str(torch.get_num_threads()),
        "instruction set of the C++ core": "the core is not installed" if core is None else core.isa_name(),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": f"{platform.system()} {platform.machine()}",
        "commit": commit() or "not known: the package was not installed from a checkout",
    }


def commit() -> str:
    """Return the commit of the checkout that the package is in, with a + if its files have changed; else empty."""
    if not (ROOT / ".git").exists():
        return ""
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head}+" if head and _git("status", "--short", "--untracked-files=no") else head


def _git(*words: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    if not hasattr(os, "sysconf"):
        return "not known"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
