"""Names of files and anchors, from whatever people call things."""

from __future__ import annotations

import re


def distinct(name: str, taken: set[str]) -> str:
    """A name for a file or an anchor, of plain letters, that is not taken yet on any system."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:80] or "unnamed"
    found, count = plain, 1
    while found.lower() in taken:
        count += 1
        found = f"{plain}-{count}"
    taken.add(found.lower())
    return found
