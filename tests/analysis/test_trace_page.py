"""The page of a trace: text is data, numbers arrive, and in a real browser the right tokens light up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import sdm
from browser import browser, missing
from sdm.analysis.trace_page import trace_page, write_trace_page
from sdm.analysis.tracing import Trace, trace

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)></script>&amp;\u2028"


class Words:
    """A tokenizer of a few words, some of them hostile, and one that is part of a character."""

    words = ("alpha ", "beta\n", HOSTILE, "\ufffd", "gamma")

    def decode(self, ids: list[int], **options: Any) -> str:
        return self.words[ids[0] % len(self.words)]

    def convert_ids_to_tokens(self, token: int) -> str:
        return "<0xE2>"


def example(length: int = 40, kinds: tuple[str, ...] = ("sliding_attention", "sdm")) -> Trace:
    torch.manual_seed(0)
    config = sdm.SDMConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=len(kinds),
        layer_types=list(kinds),
        num_slots=64,
        num_writes=4,
        num_reads=4,
        sliding_window=5,
    )
    return trace(sdm.SDMForCausalLM(config).eval(), torch.randint(0, 50, (length,)))


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_text_is_never_markup() -> None:
    page = trace_page(example(), Words(), title=HOSTILE)
    assert HOSTILE not in page
    assert "<img" not in page
    assert page.count("</script>") == 2
    data = data_of(page)
    assert HOSTILE in data["tokens"]
    assert "<0xE2>" in data["tokens"]
    assert data["nll"][0] is None


def test_a_long_text_keeps_fewer_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    result = example(60)
    assert data_of(trace_page(result))["layers"][1]["pairs"] == 24
    monkeypatch.setattr("sdm.analysis.trace_page.BUDGET", 20_000)
    small = trace_page(result)
    assert data_of(small)["layers"][1]["pairs"] < 24
    assert len(json.dumps(data_of(small))) < 4 / 3 * 20_000 + 2_000


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_in_a_browser(tmp_path: Path) -> None:
    result = example()
    page = write_trace_page(result, tmp_path / "trace.html", Words(), "A trace")
    layer, token = result.layers[1], 30
    expected = {source for source, weight in layer.sources(token) if weight}
    with browser(tmp_path) as tab:
        for width, dark in ((1440, False), (375, True)):
            tab.show_as(width, dark)
            tab.open(page)
            lit = tab.run(
                """const span = document.querySelector(`[data-token="${arguments[0]}"]`);
                span.dispatchEvent(new PointerEvent("pointerover", {bubbles: true, pointerType: "mouse"}));
                return [...document.querySelectorAll("#text span")].filter(x => x.style.backgroundColor)
                    .map(x => Number(x.dataset.token));""",
                token,
            )
            shares = layer.contributions()
            visible = {
                s for s in expected if float(shares.to_dense()[token, s]) > 0.01 * float(shares.to_dense()[token].sum())
            }
            assert visible <= set(lit) <= expected
            assert tab.console() == []
            assert [url for url in tab.requests() if url.startswith("http")] == []
            assert tab.run("return document.documentElement.scrollWidth") <= width
            assert tab.run("return document.querySelectorAll('img').length") == 0
            assert tab.run("return document.getElementById('token-title').textContent").startswith("30: ")
            moved = tab.run(
                """document.getElementById("text").dispatchEvent(
                    new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
                return document.getElementById("live").textContent;"""
            )
            assert moved.startswith("Token 31")
            tab.run('window.dispatchEvent(new Event("beforeprint"))')
            assert tab.run('return document.querySelectorAll("#arrows path").length') > 0


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_long_text_stays_smooth(tmp_path: Path) -> None:
    page = write_trace_page(example(2000), tmp_path / "trace.html", Words(), "A long trace")
    assert page.stat().st_size <= 5_000_000
    with browser(tmp_path) as tab:
        tab.show_as(1440)
        tab.open(page)
        milliseconds = tab.run(
            """const times = [];
            for (let i = 0; i < 31; ++i) {
                const start = performance.now();
                choose(1999 - 20 * i, false);
                document.body.offsetHeight;
                times.push(performance.now() - start);
            }
            return times.sort((a, b) => a - b)[15];"""
        )
        assert milliseconds <= 50
