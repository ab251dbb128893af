"""Likelihood by position, and what is gained from the context beyond the local layers' reach."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.conftest import save_model
from sdm.data import DataError
from sdm.errors import UserError
from sdm.evaluation.eval_model import EvalModel, open_model
from sdm.evaluation.inference import Scorer
from sdm.evaluation.measurement import evaluate
from sdm.evaluation.position import (
    Position,
    growth,
    nats,
    nats_at,
    position_edges,
    score_by_position,
    stretch,
    whole,
)
from sdm.evaluation.report import Point
from sdm.evaluation.statistics import Mean, PairedDifference, compare
from sdm.models.layer_types import local_reach
from tiny_models import tiny_config, tiny_model, tokens
from training.runs import text_run, train


def test_edges() -> None:
    assert position_edges(300) == [0, 64, 128, 256, 300]
    assert position_edges(64) == [0, 64]
    assert position_edges(10, first=64) == [0, 10]
    assert position_edges(400, first=100, per_doubling=2) == [0, 100, 141, 200, 283, 400]


def model_of(stack: str, tmp_path: Path, **fields: Any) -> EvalModel:
    torch.manual_seed(0)
    return open_model(save_model(tiny_model(stack, **fields), tmp_path / stack))


@pytest.mark.parametrize("stack", ["sdm", "full_attention", "shifted"])
def test_one_pass(stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in stretches of time, it is what one pass over the whole says."""
    lm, rows = model_of(stack, tmp_path), tokens(2, 301)
    edges = position_edges(300, first=50)
    expected = Scorer(lm.model).nll(rows[:, :-1], rows[:, 1:])[0].double()
    monkeypatch.setattr("sdm.evaluation.position.TOKENS", 74)
    told: list[float] = []
    found, withheld = score_by_position(lm, rows, edges, partial=told.append)
    assert withheld is None
    assert told[-1] == 600
    for row in range(2):
        for place, (start, stop) in enumerate(itertools.pairwise(edges)):
            assert found[row][place] == pytest.approx(float(expected[row, start:stop].sum()), rel=1e-4)


def test_reach() -> None:
    """What the layers that do not see everything see stacked."""
    assert local_reach(tiny_config("sdm")) == 3 * 4
    assert local_reach(tiny_config("all_recurrent")) == 0
    assert local_reach(tiny_config("shifted")) == 2
    assert local_reach(tiny_config("pkm")) == 3 * 4


@pytest.mark.parametrize("stack", ["local", "sdm"])
def test_context_gain(stack: str, tmp_path: Path) -> None:
    """Local layers alone gain nothing, whatever went before: the reach is all that they see, and no token more. A layer
    that sees everything does gain or lose, from where something is withheld on."""
    if stack == "local":
        kinds = ["sliding_attention", "token_shift", "sliding_attention", "sliding_attention"]
        lm = model_of("sdm", tmp_path, global_layer=None, layer_types=kinds)
    else:
        lm = model_of("sdm", tmp_path)
    reach, rows = local_reach(lm.model.config), tokens(2, 501)
    edges = [0, 64, 128, 300, 500]
    full, withheld = score_by_position(lm, rows, edges, reach)
    assert withheld is not None
    gains = torch.tensor(withheld) - torch.tensor(full)
    assert (gains[:, 0] == 0).all()
    if stack == "local":
        assert gains.abs().max() < 1e-3
        # One token less than the local layers see, and the first token of a block misses something.
        _, less = score_by_position(lm, rows, edges, reach - 2)
        assert (torch.tensor(less) - torch.tensor(full))[:, 1:].abs().min() > 1e-3
    else:
        assert gains[:, 1:].abs().min() > 1e-2


def test_withheld_is_scored_as_it_says(tmp_path: Path) -> None:
    """By hand: the start token, `reach` tokens, and the block."""
    lm, row = model_of("sdm", tmp_path), tokens(1, 211)
    edges, reach = [0, 64, 128, 192, 210], 20
    _, withheld = score_by_position(lm, row, edges, reach)
    assert withheld is not None
    for place, start in enumerate((64, 128, 192), 1):
        stop = min(start + 64, 210)
        seen = torch.cat([torch.tensor([[lm.start_id]]), row[:, start - reach : stop + 1]], 1)
        nats = Scorer(lm.model).nll(seen[:, :-1], seen[:, 1:])[0][:, 1 + reach :]
        assert withheld[0][place] == pytest.approx(float(nats.double().sum()), rel=1e-5)


def test_documents_are_joined_where_none_is_long_enough(folders: dict[str, Path], texts: Path, tmp_path: Path) -> None:
    lm = open_model(folders["sdm"])
    single = evaluate("position", Position(data=(str(texts),), length=200), [(lm, tmp_path / "single")])[0]
    assert single.summary is not None
    assert single.summary["joined"] is False
    assert single.summary["documents"] == 3
    joined = evaluate("position", Position(data=(str(texts),), length=500), [(lm, tmp_path / "joined")])[0]
    assert joined.summary is not None
    assert joined.summary["joined"] is True
    assert joined.data["sources"][0]["joined"] is True
    assert joined.summary["documents"] == 2
    assert joined.data["reach"] == 12
    assert sum(one["tokens"] for one in joined.summary["positions"]) == 1000
    assert all(one["gain_low"] <= one["gain"] <= one["gain_high"] for one in joined.summary["positions"])
    with pytest.raises(DataError, match=r"no document is longer than 500 tokens, the longest has .* or --join auto"):
        Position(data=(str(texts),), length=500, join="never").plan(lm)
    with pytest.raises(DataError, match="no document is longer than 5000 tokens, the longest of all joined has"):
        Position(data=(str(texts),), length=5000).plan(lm)


def test_a_run_and_another_model(folders: dict[str, Path], texts: Path, tmp_path: Path) -> None:
    """A run has its own length; a model of others has no reach, and is told to say it."""
    train(text_run(tmp_path / "own"), tmp_path / "run")
    results = evaluate("position", Position(), [(open_model(tmp_path / "run"), tmp_path / "out")])[0]
    assert results.data["length"] == 32
    llama = open_model(folders["llama"])
    with pytest.raises(UserError, match="--length: llama is no run that was trained on text"):
        Position(data=(str(texts),)).plan(llama)
    with pytest.raises(UserError, match="llama takes at most 4096 tokens, got 5000: lower --length"):
        Position(data=(str(texts),), length=5000).plan(llama)
    plain = evaluate("position", Position(data=(str(texts),), length=200), [(llama, tmp_path / "plain")])[0]
    assert plain.summary is not None
    assert "gain" not in plain.summary["positions"][0]
    gained = evaluate("position", Position(data=(str(texts),), length=200, reach=16), [(llama, tmp_path / "gain")])[0]
    assert gained.summary is not None
    assert gained.summary["positions"][-1]["gain"] != 0


def test_models_are_compared_on_the_same_tokens(folders: dict[str, Path], texts: Path, tmp_path: Path) -> None:
    """Gains only where the same was withheld; nothing where the tokens are others."""
    measurement = Position(data=(str(texts),), length=100)
    torch.manual_seed(5)
    save_model(tiny_model(), tmp_path / "other")
    paths = {**folders, "other": tmp_path / "other"}
    models = [(open_model(path), tmp_path / f"out-{name}") for name, path in paths.items()]
    ours, llama, other = evaluate("position", measurement, models)
    found = {one.quantity: one for one in compare(measurement, ours, other)}
    assert list(found) == ["nats/token", "nats/token to 64", "nats/token to 100", "gain to 64", "gain to 100"]
    assert ours.summary is not None
    assert other.summary is not None
    last = [one.summary["positions"][-1]["gain"] for one in (ours, other)]
    assert found["gain to 100"].difference.value == pytest.approx(last[1] - last[0])
    assert [one.quantity for one in compare(measurement, ours, llama)] == list(found)[:3]
    other.data["sources"][0]["tokens"] = "others"
    assert compare(measurement, ours, other) == []


PEAK = """
import resource, sys, torch
from pathlib import Path
from sdm.evaluation.position import position_edges, score_by_position
from sdm.evaluation.eval_model import open_model
torch.set_num_threads(1)
lm, length = open_model(Path(sys.argv[1])), int(sys.argv[2])
rows = torch.randint(97, (1, length + 1), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
full, withheld = score_by_position(lm, rows, position_edges(length), 12)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_document(folders: dict[str, Path]) -> None:
    """In processes of their own. docs/evaluation.md has the command for a million tokens."""
    peaks = []
    for length in (8_192, 32_768):
        command = [sys.executable, "-c", PEAK, str(folders["sdm"]), str(length)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] <= 1.1 * peaks[0]


def test_several_models_are_drawn_by_their_differences() -> None:
    """Bands over documents would hide the curves of several models; those of paired differences do not."""
    spans = [
        {"start": start, "stop": stop, "nll": 3.0, "low": 2.0, "high": 4.0, "tokens": 64}
        for start, stop in ((0, 64), (64, 256))
    ]
    summary = {"positions": spans, "nll": 3.0, "tokens": 128, "documents": 4, "joined": False}
    alone, several = (Position().report(dict.fromkeys(names, summary)).charts[0] for names in (["a"], ["a", "b"]))
    assert alone.has_intervals()
    assert not several.has_intervals()
    differences = [
        PairedDifference("nats/token", 3.0, 3.2, Mean(0.2, 0.1, 0.3, 4)),
        PairedDifference("nats/token to 256", 3.0, 3.1, Mean(0.1, 0.05, 0.15, 4)),
    ]
    (chart,) = Position().difference_charts(summary, "a", {"b": differences})
    assert chart.curves == {"b - a": [Point(128, 0.1, 0.05, 0.15)]}
    assert [reference.at for reference in chart.references] == [0]
    differences.append(PairedDifference("gain to 64", 0.1, 0.4, Mean(0.3, 0.2, 0.4, 4)))
    _, gain = Position().difference_charts(summary, "a", {"b": differences})
    assert gain.name == "context-gain-differences"
    assert gain.curves == {"b - a": [Point(32, 0.3, 0.2, 0.4)]}


def test_numbers_of_a_document_and_of_a_run() -> None:
    unit = {"edges": [0, 2, 4, 8], "nll": [2.0, 6.0, 16.0]}
    assert whole(unit) == 3.0
    assert [stretch(place)(unit) for place in (0, 1, -1)] == [1.0, 3.0, 4.0]
    assert growth(unit) == 3.0
    summary = {"nll": 3.0, "positions": [{"nll": 1.0, "gain": None}, {"nll": 4.0, "gain": 0.5}]}
    assert (nats(summary), nats_at(-1)(summary)) == (3.0, 4.0)
    assert [nats_at(place, "gain")(summary) for place in (0, 1)] == [None, 0.5]
