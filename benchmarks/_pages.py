"""Puts tables into pages of the documentation, between two comments."""

from __future__ import annotations

from pathlib import Path


def write_between(page: Path, marks: tuple[str, str], lines: list[str]) -> None:
    begin, end = marks
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(before + "\n".join([begin, "", *lines, "", end]) + after)
