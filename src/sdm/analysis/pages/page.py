"""The content of a page as plain data. In all texts `words in backticks` are shown as code, the rest as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from matplotlib.figure import Figure

from sdm.evaluation.report import AnyChart, Cell, Table

Verdict = Literal["agrees", "differs", "unclear", "measured", "failed", "missing"]


@dataclass(frozen=True)
class Illustration:
    """A chart or a figure with the numbers that it is drawn from. `illustration` makes one of a chart alone."""

    name: str
    """Name of its files, without a suffix."""
    caption: str
    figure: AnyChart | Figure
    """A chart is drawn when the page is written."""
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    """Its data, for the CSV file and the table below it."""
    alt: str
    """What readers who cannot see the figure should know of it."""

    def __post_init__(self) -> None:
        for place, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"rows[{place}] of {self.name!r} must have {len(self.columns)} values, got {len(row)}")


def illustration(chart: AnyChart, caption: str = "", name: str = "") -> Illustration:
    """Make an illustration of a chart and its data.

    Args:
        chart: What is drawn.
        caption: By default the title of the chart, and what its bands are.
        name: Name of the files, by default the chart's.
    """
    bands = "; bands: 95% intervals" if chart.has_intervals() else ""
    caption = caption or f"{chart.title}{bands}."
    return Illustration(name or chart.name, caption, chart, chart.columns, chart.rows(), chart.in_words())


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, and what was measured about it."""

    key: str
    """Its anchor in the page."""
    title: str
    claim: str
    """What the paper says, in one sentence; with the verdict "measured", what was measured."""
    found: str
    """Our number with its interval, ready to read."""
    paper: str
    """The paper's number, or "not reported"; empty if the paper has nothing to do with it."""
    verdict: Verdict
    """Whether the direction is the paper's. "measured": there is nothing of the paper to compare with; "failed" and
    "missing": there is no result."""
    why: str = ""
    """Why it differs, what is missing, or the end of the log of what failed."""
    illustrations: tuple[Illustration, ...] = ()
    tables: tuple[Table, ...] = ()
    deviations: tuple[str, ...] = ()
    """Every deviation from the paper's recipe; they stand beside the figures."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.verdict not in get_args(Verdict):
            raise ValueError(f"verdict must be one of {', '.join(get_args(Verdict))}, got {self.verdict!r}")


@dataclass(frozen=True)
class Section:
    """Details at the end of the page, folded: configurations, the environment, commands."""

    title: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    preformatted: str = ""
    """Shown as it is, such as a file or commands."""
    links: tuple[tuple[str, str], ...] = ()
    """Texts and addresses of files beside the page."""


@dataclass(frozen=True)
class Page:
    """A page: the overview and the findings first, details folded at the end."""

    title: str
    lead: str
    """Summary for readers who have a minute. An empty line begins a paragraph."""
    findings: tuple[Finding, ...]
    sections: tuple[Section, ...] = ()
