"""A page in a real browser: on a phone, a tablet, a desk and on paper, by day and by night.

Screenshots go where the variable SDM_SCREENSHOTS says, else into pytest's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import browser
from sample_page import sample_page
from sdm.analysis.pages import write_page

pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
LOOKS = Path(__file__).with_name("looks.js").read_text()
WIDTHS = (360, 800, 1280)
PAPER = 718  # pixels of the width of a sheet without its margins
POINT = 4 / 3  # pixels


def faults(tab: browser.Browser, smallest: float = 11) -> list[str]:
    """What is wrong with how the page looks."""
    return tab.run(LOOKS, smallest)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(sample_page(), tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = os.environ.get("SDM_SCREENSHOTS")
    folder = Path(chosen) if chosen else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_looks_right(tab: browser.Browser, page: Path, pictures: Path, width: int, dark: bool) -> None:
    tab.show_as(width, dark)
    tab.open(page)
    assert faults(tab) == []
    assert tab.run("return [document.images.length, innerWidth]") == [5, width]
    tab.screenshot(pictures / f"{width}-{'dark' if dark else 'light'}.png")
    tab.run("for (const one of document.querySelectorAll('details')) one.open = true")
    assert faults(tab) == []
    assert tab.console() == []
    assert tab.requests() == [page.as_uri()]


def test_it_is_dark_in_the_dark(tab: browser.Browser, page: Path) -> None:
    grounds = []
    for dark in (False, True):
        tab.show_as(800, dark)
        tab.open(page)
        grounds.append(tab.run("return getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_prints_everything_on_white(tab: browser.Browser, page: Path, pictures: Path, dark: bool) -> None:
    """Folded details are open on paper, and a finding with figures begins a sheet."""
    tab.show_as(PAPER, dark, media="print")
    tab.open(page)
    assert faults(tab, smallest=7.9 * POINT) == []
    assert tab.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    folded = "return [...document.querySelectorAll('#details pre, #details table')].map((one) => one.checkVisibility())"
    assert tab.run(folded) == [True, True, True]
    with_figures = [finding for finding in sample_page().findings if finding.illustrations]
    assert tab.print(pictures / f"{'dark' if dark else 'light'}.pdf") >= 1 + len(with_figures)


def test_with_the_keyboard_the_findings_are_one_step_away(tab: browser.Browser, page: Path) -> None:
    tab.show_as(800)
    tab.open(page)
    place = (
        "const box = document.querySelector('.skip').getBoundingClientRect(); return box.left >= 0 && box.right <= 800"
    )
    assert tab.run(place) is False
    tab.run("document.querySelector('.skip').focus()")
    assert tab.run(place) is True


BROKEN = {
    "the page is": '<div style="width: 2000px">wide</div>',
    "broken image": '<img src="data:image/png;base64,AAAA" alt="none">',
    "lies over": '<p>one</p><p style="margin-top: -2.5em">other</p>',
    "contrast 1": '<p style="color: #eee; background: #fff">pale</p>',
    "small print": '<p style="font-size: 8px">small</p>',
    "outside the window": '<p style="position: fixed; left: -10px">left</p>',
    "wider than itself": '<p style="width: 40px; white-space: nowrap">these are many words in one line</p>',
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_check_sees_faults(tab: browser.Browser, tmp_path: Path, fault: str) -> None:
    file = tmp_path / "broken.html"
    file.write_text(f"<!DOCTYPE html><title>broken</title><main>{BROKEN[fault]}</main>")
    tab.show_as(800)
    tab.open(file)
    assert any(fault in one for one in faults(tab))


def test_the_check_sees_requests_and_errors(tab: browser.Browser, page: Path, tmp_path: Path) -> None:
    """Also those that the page's own policy stops."""
    file = tmp_path / "asking.html"
    image = '<img src="http://127.0.0.1:9/picture.png" alt="none">'
    file.write_text(f"<!DOCTYPE html><title>asking</title>{image}")
    tab.open(file)
    assert "http://127.0.0.1:9/picture.png" in tab.requests()
    file.write_text(page.read_text().replace("</main>", f"{image}<script>document.body.remove()</script></main>"))
    tab.open(file)
    assert len(tab.console()) == 2
    assert tab.run("return document.body !== null")
