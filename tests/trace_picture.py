"""A picture of the page of a trace with one token chosen, for the documentation.

    python tests/trace_picture.py trace.html 520 docs/figures/trace-recall.png

Needs Chromium and chromedriver (`tests/browser.py`).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import browser


def take_picture(page: Path, token: int, picture: Path) -> None:
    """Choose a token on a page, 1,280 pixels wide, and save a picture of all of it."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as tab:
        tab.show_as(1280)
        tab.open(page)
        tab.run("choose(arguments[0], false)", token)
        tab.screenshot(picture)


if __name__ == "__main__":
    take_picture(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
