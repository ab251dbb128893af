"""The examples of README, CONTRIBUTING and docs run as printed, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# "notest" behind the language: templates, and what takes files or minutes.
BLOCK = re.compile(r"^```python( notest)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MOST_NOTEST = 12


def blocks(page: Path) -> list[tuple[int, str]]:
    """The line of each example that is run, and its code."""
    text = page.read_text()
    return [(text.count("\n", 0, match.start()) + 2, match[2]) for match in BLOCK.finditer(text) if not match[1]]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a page one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    threads, names = torch.get_num_threads(), dict[str, Any]()
    try:
        for line, code in blocks(page):
            # Tracebacks name the line of the page.
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    finally:
        torch.set_num_threads(threads)


def test_every_block_is_found() -> None:
    texts = [page.read_text() for page in PAGES]
    fences = sum(len(re.findall(r"^ *(```|~~~) *(python|py)\b", text, re.MULTILINE)) for text in texts)
    assert fences == sum(len(BLOCK.findall(text)) for text in texts), "python blocks start with ```python or ... notest"
    assert sum(text.count("```python notest\n") for text in texts) <= MOST_NOTEST


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
