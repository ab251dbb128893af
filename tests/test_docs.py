"""The pages of docs/: anchors that exist, pictures that are those of their script. `make docs` checks the rest."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PICTURES = ("product-keys.svg", "write.svg", "read.svg", "state-over-time.svg")


def anchors(page: Path) -> set[str]:
    """The anchors that code hosts and the site give to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text()):
        other = page.parent / target if target else page
        assert anchor in anchors(other), f"{target}#{anchor}"


def test_pictures_are_those_of_the_script(tmp_path: Path) -> None:
    """After a change of the script: `python docs/site/pictures.py`."""
    runpy.run_path(str(ROOT / "docs" / "site" / "pictures.py"))["main"](tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(PICTURES)
    for name in PICTURES:
        assert (tmp_path / name).read_text() == (ROOT / "docs" / "figures" / name).read_text(), name


def test_navigation_names_pages_that_exist() -> None:
    pages = re.findall(r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(pages) > 30
    for page in {*pages} - {"contributing.md", "changelog.md"}:
        assert (ROOT / "docs" / page).is_file(), page
