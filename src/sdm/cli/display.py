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
    console().print(*parts)
