"""Write a page as files: report.html, and beside it every figure as PNG and SVG and its data as CSV.

The page is one HTML text without script or requests. All data goes through `escape`.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import html
import io
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

import sdm
from sdm.analysis.draw import draw, render
from sdm.analysis.pages.page import Finding, Illustration, Page, Section, Verdict
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


ROWS = 60  # of a figure's data that the page itself shows
STYLE = Path(__file__).with_name("style.css")
# Even a mistake in this file could not load or run anything.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
NO_BREAK = "\N{NO-BREAK SPACE}"
MEDIA = {"svg": "image/svg+xml", "png": "image/png"}

# Drawn, so that they look alike with every font. 16 x 16, a stroke each.
ICONS: dict[Verdict, str] = {
    "agrees": "M3 8.5l3.2 3.2L13 4.8",
    "differs": "M3 6h10M3 10h10M10 3L6 13",
    "unclear": "M5.2 6a2.8 2.8 0 1 1 4.2 2.4c-.9.5-1.4 1-1.4 2M8 12.6v.4",
    "measured": "M3.5 13V9M8 13V3M12.5 13V6.5",
    "failed": "M4 4l8 8M12 4l-8 8",
    "missing": "M3 8h1.5M7.2 8h1.6M11.5 8H13",
}
MEANINGS: dict[Verdict, str] = {
    "agrees": "the direction is the paper's",
    "differs": "the direction is not the paper's",
    "unclear": "the data does not decide",
    "measured": "there is nothing of the paper to compare with",
    "failed": "it ran and failed",
    "missing": "it was not run",
}


@dataclass
class Drawn:
    """The files of an illustration, and which of them the page shows."""

    stem: str
    files: dict[str, bytes]
    """By their path beside the page; without pictures if it could not be drawn."""
    fault: str = ""
    """Why it could not be drawn."""
    kind: str = "svg"
    """Which of its pictures is in the page."""

    @property
    def shown(self) -> bytes:
        """The picture in the page."""
        return self.files[f"figures/{self.stem}.{self.kind}"]


def distinct(name: str, taken: set[str]) -> str:
    """Make a name of plain letters for a file or an anchor, and add it to those that are taken."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:80] or "unnamed"
    free, count = plain, 1
    while free.lower() in taken:
        count += 1
        free = f"{plain}-{count}"
    taken.add(free.lower())
    return free


def document(page: Page, drawn: Mapping[int, Drawn]) -> str:
    """Return the page as HTML.

    Args:
        page: The page.
        drawn: Every illustration of the page by its identity.
    """
    anchors = _anchors(page)
    findings = [_finding(finding, anchor, drawn) for finding, anchor in zip(page.findings, anchors, strict=True)]
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(page.title)}</title>",
            f"<style>\n{STYLE.read_text()}</style>\n</head>\n<body>",
            '<a class="skip" href="#findings">Skip to the findings</a>',
            f"<header>\n<h1>{escape(page.title)}</h1>",
            *(f'<p class="lead">{text(part)}</p>' for part in re.split(r"\n\s*\n", page.lead.strip()) if part),
            "</header>\n<main>",
            _overview(page, anchors),
            '<div id="findings">',
            *findings,
            "</div>",
            _details(page.sections),
            "</main>\n</body>\n</html>\n",
        )
    )


def escape(value: object) -> str:
    """Escape a value for HTML. Control characters, which HTML does not allow, are replaced."""
    return html.escape(
        re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", str(value))
    )


def text(value: str) -> str:
    """Escape a text: `words in backticks` become code, [an, interval] and a ± margin stay on one line."""
    whole = re.sub(r"\[[^\s\]]+, [^\s\]]+\]|\S+ ± \S+", lambda match: match[0].replace(" ", NO_BREAK), escape(value))
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", whole)


def _anchors(page: Page) -> list[str]:
    taken = {"findings", "overview", "details"}
    return [distinct(finding.key, taken) for finding in page.findings]


def _badge(verdict: Verdict) -> str:
    icon = f'<svg viewBox="0 0 16 16" aria-hidden="true" focusable="false"><path d="{ICONS[verdict]}"/></svg>'
    return f'<span class="verdict {verdict}">{icon}{verdict}</span>'


def _overview(page: Page, anchors: Sequence[str]) -> str:
    """Return the table of all findings. On a phone a row becomes a card; roles keep it a table for screen readers."""
    if not page.findings:
        return ""
    compared = any(finding.paper for finding in page.findings)
    heads = ("claim" if compared else "what", "found here", *(("paper",) if compared else ()), "verdict")
    rows = []
    for finding, anchor in zip(page.findings, anchors, strict=True):
        paper = (text(finding.paper),) if compared else ()
        cells = (text(finding.found), *paper, _badge(finding.verdict))
        claim = f'<a href="#{anchor}">{escape(finding.title)}</a><span class="claim">{text(finding.claim)}</span>'
        shown = (
            f'<td role="cell" data-label="{head}">{cell}</td>' for head, cell in zip(heads[1:], cells, strict=True)
        )
        rows.append(f'<tr role="row"><th role="rowheader" scope="row">{claim}</th>{"".join(shown)}</tr>')
    used = dict.fromkeys(finding.verdict for finding in page.findings)
    legend = "; ".join(f"{verdict}: {MEANINGS[verdict]}" for verdict in MEANINGS if verdict in used)
    return "\n".join(
        (
            '<section id="overview" aria-labelledby="overview-title">\n<h2 id="overview-title">At a glance</h2>',
            '<table class="overview" role="table">\n<thead role="rowgroup"><tr role="row">',
            *(f'<th role="columnheader" scope="col">{head}</th>' for head in heads),
            '</tr></thead>\n<tbody role="rowgroup">',
            *rows,
            f'</tbody>\n</table>\n<p class="legend">{legend}.</p>\n</section>',
        )
    )


def _finding(finding: Finding, anchor: str, drawn: Mapping[int, Drawn]) -> str:
    pictures = [_picture(picture, drawn[id(picture)]) for picture in finding.illustrations]
    beside = _list("Not the paper's recipe", "deviations", finding.deviations)
    notes = _list("Notes", "notes", finding.notes)
    if pictures and (beside or len(pictures) == 1):
        beside, notes = beside + notes, ""
    kind = "evidence both" if pictures and beside else "evidence"
    parts = (("pictures", "".join(pictures)), ("beside", beside))
    evidence = "".join(f'<div class="{name}">\n{part}</div>\n' for name, part in parts if part)
    label = "The paper says" if finding.paper else "What"
    return "\n".join(
        (
            f'<section class="finding" id="{anchor}" aria-labelledby="{anchor}-title">',
            f'<h2 id="{anchor}-title">{escape(finding.title)}</h2>',
            f'<p class="claim"><span class="label">{label}</span> {text(finding.claim)}</p>',
            '<dl class="answer">',
            f'<div class="found"><dt>Found here</dt><dd>{text(finding.found)}</dd></div>',
            f'<div class="paper"><dt>Paper</dt><dd>{text(finding.paper)}</dd></div>' if finding.paper else "",
            f"<div><dt>Verdict</dt><dd>{_badge(finding.verdict)}</dd></div>\n</dl>",
            _why(finding),
            f'<div class="{kind}">\n{evidence}</div>' if evidence else "",
            *map(_table, finding.tables),
            f'<div class="beside below-all">\n{notes}</div>' if notes else "",
            "</section>",
        )
    )


def _why(finding: Finding) -> str:
    if not finding.why:
        return ""
    if "\n" in finding.why.strip():  # a log
        return f'<pre class="why" tabindex="0">{escape(finding.why.strip())}</pre>'
    return f'<p class="why">{text(finding.why)}</p>'


def _list(title: str, kind: str, items: Iterable[str]) -> str:
    shown = "\n".join(f"<li>{text(item)}</li>" for item in items)
    return f'<div class="{kind}">\n<h3>{title}</h3>\n<ul>\n{shown}\n</ul>\n</div>\n' if shown else ""


def _picture(illustration: Illustration, drawn: Drawn) -> str:
    links = " ".join(
        f'<a href="{path}">{path.rsplit(".", 1)[1].upper()}</a>' for path in sorted(drawn.files, reverse=True)
    )
    if drawn.fault:
        picture = f'<p class="why">This figure could not be drawn: {escape(drawn.fault)}</p>'
    else:
        source = f"data:{MEDIA[drawn.kind]};base64,{base64.b64encode(drawn.shown).decode()}"
        picture = f'<div class="card"><img src="{source}" alt="{escape(illustration.alt)}"></div>'
    return (
        f"<figure>\n{picture}\n<figcaption>{text(illustration.caption)}\n"
        f'<span class="files">Files beside this page: {links}</span></figcaption>\n{_numbers(illustration)}</figure>\n'
    )


def _numbers(illustration: Illustration) -> str:
    """Return the data of a figure as a table, unless it is long: a page without its files still has it."""
    if not 0 < len(illustration.rows) <= ROWS:
        return ""
    rows = [tuple(map(_number, row)) for row in illustration.rows]
    table = _table(Table("", illustration.columns, rows))
    return f"<details>\n<summary>The numbers</summary>\n{table}\n</details>\n"


def _number(value: Cell) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def _table(table: Table) -> str:
    """Return a table in a box that scrolls by itself when it is wider than the page."""
    rows = []
    for row in table.rows:
        first, *others = (escape(cell) for cell in row)
        rows.append(f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>')
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    label = f' aria-label="{escape(table.title)}"' if table.title else ' aria-label="numbers"'
    return "\n".join(
        (
            f'<div class="scroll" role="region" tabindex="0"{label}>\n<table class="numbers">{caption}\n<thead><tr>',
            *(f'<th scope="col">{escape(head)}</th>' for head in table.columns),
            "</tr></thead>\n<tbody>",
            *rows,
            "</tbody>\n</table>\n</div>",
            f'<p class="below">{text(table.caption)}</p>' if table.caption else "",
        )
    )


def _details(sections: Sequence[Section]) -> str:
    if not sections:
        return ""
    parts = ['<section id="details" aria-labelledby="details-title">\n<h2 id="details-title">Details</h2>']
    for section in sections:
        parts.append(f"<details>\n<summary>{escape(section.title)}</summary>")
        parts += [f"<p>{text(paragraph)}</p>" for paragraph in section.paragraphs]
        parts += map(_table, section.tables)
        parts += [f'<p><a href="{escape(address)}">{escape(label)}</a></p>' for label, address in section.links]
        if section.preformatted:
            parts.append(f'<pre tabindex="0">{escape(section.preformatted.rstrip())}</pre>')
        parts.append("</details>")
    return "\n".join((*parts, "</section>"))
