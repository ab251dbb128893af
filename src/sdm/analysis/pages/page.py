"""What is on a page, as plain data. In all texts `words in backticks` are shown as code, and the rest as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from matplotlib.figure import Figure

from sdm.evaluation.report import Table

Verdict = Literal["agrees", "differs", "unclear", "measured", "failed", "missing"]


@dataclass(frozen=True)
class Illustration:
    """A figure with the numbers that it is drawn from."""

    name: str
    """Of its files, without a suffix."""
    caption: str
    figure: Figure
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    """Its data, for the CSV file and the table below it."""
    alt: str
    """What somebody who cannot see the figure should know of it."""

    def __post_init__(self) -> None:
        for place, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"rows[{place}] of {self.name!r} must have {len(self.columns)} values, got {len(row)}")


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, and what we have found of it."""

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


@dataclass(frozen=True)
class Page:
    title: str
    lead: str
    """What there is to know if there is but a minute. An empty line begins a paragraph."""
    findings: tuple[Finding, ...]
    sections: tuple[Section, ...] = ()
