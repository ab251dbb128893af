"""The files of a page: complete, safe, small, and the same for the same data."""

from __future__ import annotations

import csv
import errno
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from sample_page import recall_illustration, sample_page
from sdm.analysis.pages import Finding, Illustration, Page, Section, write, write_page
from sdm.evaluation.report import Table

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Tree(HTMLParser):
    """Checks that tags close in order, and collects what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    assert write_page(sample_page(), folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def tree(folder: Path) -> Tree:
    return Tree((folder / "report.html").read_text())


def small_page(**fields: Any) -> Page:
    finding = Finding("key", "title", "claim", "found", "paper", "agrees", **fields)
    return Page("page", "lead", (finding,))


def illustration(figure: Figure | None = None, **fields: Any) -> Illustration:
    figure = figure or Figure(figsize=(2, 2))
    defaults: dict[str, Any] = {
        "name": "one",
        "caption": "caption",
        "columns": ("x", "y"),
        "rows": [(1, 2)],
        "alt": "a",
    }
    return Illustration(figure=figure, **(defaults | fields))


def test_every_figure_has_its_files_and_every_link_its_target(folder: Path, tree: Tree) -> None:
    names = {"recall", "scaling", "scaling-2", "slot-use", "slot-use-2"}
    assert {path.stem for path in (folder / "data").iterdir()} == names
    assert {path.name for path in (folder / "figures").iterdir()} == {f"{n}.{k}" for n in names for k in ("png", "svg")}
    anchors = {attributes["id"] for _, attributes in tree.tags if attributes.get("id")}
    for link in tree.all("a"):
        target = link["href"]
        assert target[1:] in anchors if target.startswith("#") else (folder / target).is_file()
    assert {path.name for path in folder.iterdir()} == {"report.html", "figures", "data"}


def test_the_page_needs_nothing_else(folder: Path, tree: Tree) -> None:
    text = (folder / "report.html").read_text()
    assert len(text) < 1_000_000
    assert not tree.all("script")
    assert not tree.all("link")
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in tree.all("img"))
    assert "url(" not in text
    assert "@import" not in text


def test_the_overview_comes_first_and_says_every_verdict_in_a_word(tree: Tree) -> None:
    words = " ".join(" ".join(tree.text).split())  # whatever kind of space
    overview = words[words.index("At a glance") : words.index("The paper says")]
    for finding in sample_page().findings:
        for part in (finding.title, finding.claim, finding.found, finding.paper, finding.verdict):
            assert part in overview


def test_what_a_reader_who_cannot_see_needs(tree: Tree) -> None:
    assert tree.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in tree.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(image["alt"] for image in tree.all("img"))
    assert all(head["scope"] in ("row", "col") for head in tree.all("th"))
    assert all("aria-label" in box for box in tree.all("div") if box.get("class") == "scroll")
    assert tree.all("a")[0] == {"class": "skip", "href": "#findings"}
    ids = [attributes["id"] for _, attributes in tree.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_same_data_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_page(sample_page(), tmp_path)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 16
    for path in files:
        assert (tmp_path / path.relative_to(folder)).read_bytes() == path.read_bytes(), path.name


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    hostile = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>`<b>`&amp;\x00\ud800"
    table = Table(hostile, (hostile, hostile), [(hostile, hostile)], hostile)
    drawn = illustration(name=f"../../{hostile}", caption=hostile, columns=(hostile,), rows=[[hostile]], alt=hostile)
    finding = Finding(hostile, *[hostile] * 4, "agrees", hostile, (drawn,), (table,), (hostile,), (hostile,))
    log = Finding(hostile, *[hostile] * 4, "failed", f"{hostile}\n{hostile}")
    page = Page(hostile, hostile, (finding, log), (Section(hostile, (hostile,), (table,), hostile),))
    tree = Tree(write_page(page, tmp_path / "page").read_text())
    assert not tree.all("script")
    assert not tree.all("b")
    assert [image["alt"] for image in tree.all("img")] == [
        hostile.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    ]
    assert not any(name.startswith("on") for _, attributes in tree.tags for name in attributes)
    assert {path.name for path in tmp_path.iterdir()} == {"page"}
    assert all(re.fullmatch(r"[\w.-]+", path.name) for path in (tmp_path / "page").rglob("*"))


def test_data_has_all_its_digits_and_no_formulas(tmp_path: Path) -> None:
    third = 1 / 3
    rows = [("=HYPERLINK(1)", third, None), ("-1.5", -2, "a,b"), ("@x", np.float64(third), "-cmd")]
    write_page(small_page(illustrations=(illustration(columns=("name", "x", "y"), rows=rows),)), tmp_path)
    with (tmp_path / "data" / "one.csv").open(newline="") as file:
        found = list(csv.reader(file))
    assert found == [
        ["name", "x", "y"],
        ["'=HYPERLINK(1)", repr(third), ""],
        ["-1.5", "-2", "a,b"],
        ["'@x", repr(third), "'-cmd"],
    ]


def test_a_figure_that_cannot_be_drawn_leaves_the_page_standing(tmp_path: Path) -> None:
    figure = Figure()
    figure.suptitle(r"$\unknown{$")
    tree = Tree(write_page(small_page(illustrations=(illustration(figure), illustration())), tmp_path).read_text())
    assert len(tree.all("img")) == 1
    assert (tmp_path / "data" / "one.csv").is_file()
    assert "could not be drawn: ValueError" in " ".join(tree.text)


def test_figures_become_pixels_when_the_page_would_be_too_large(tmp_path: Path) -> None:
    figure = Figure(figsize=(3, 3))
    figure.subplots().plot(*np.random.default_rng(0).random((2, 40_000)), ",")
    path = write_page(small_page(illustrations=(recall_illustration(), illustration(figure))), tmp_path)
    assert (tmp_path / "figures" / "one.svg").stat().st_size > write.LARGEST
    assert path.stat().st_size < 300_000
    kinds = [image["src"].split(";")[0] for image in Tree(path.read_text()).all("img")]
    assert kinds == ["data:image/svg+xml", "data:image/png"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_page(small_page(), tmp_path)
    before = (tmp_path / "report.html").read_bytes()
    plain = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.suffix == ".png":
            plain(path, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    for folder in (tmp_path, tmp_path / "new" / "deep"):
        with pytest.raises(OSError, match="No space left"):
            write_page(small_page(illustrations=(illustration(),)), folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["report.html"]
    assert (tmp_path / "report.html").read_bytes() == before


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"rows\[1\] of 'one' must have 2 values, got 1"):
        illustration(rows=[(1, 2), (1,)])
    with pytest.raises(ValueError, match=r"verdict must be one of agrees, differs, .* got 'maybe'"):
        Finding("key", "title", "claim", "found", "paper", "maybe")  # type: ignore[arg-type]
