"""Where tables go."""

from __future__ import annotations

from typing import Any

WIDTH = 80  # at least: a narrower terminal breaks lines itself


def console() -> Any:
    from rich.console import Console

    made = Console()
    made.width = max(made.width, WIDTH)
    return made


def show(*parts: Any) -> None:
    """Print tables and lines. A table that is wider than the terminal is printed in parts."""
    from sdm.analysis.terminal import print_fitting

    print_fitting(console(), *parts)
