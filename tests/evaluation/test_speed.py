"""What a token costs: a fixed state stays as it is, keys and values grow; models take turns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evaluation.conftest import OTHERS, other_model, save_model
from sdm.data import DataError
from sdm.errors import UserError
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.inference import Scorer, Stream
from sdm.evaluation.measurement import Advance, evaluate
from sdm.evaluation.speed import Speed
from tiny_models import tiny_model, tokens


@pytest.mark.parametrize("kind", [*OTHERS, "sdm", "full_attention"])
def test_stream(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is read token by token says what the whole says."""
    model = other_model(kind) if kind in OTHERS else tiny_model(kind)
    monkeypatch.setattr("sdm.evaluation.inference.PIECE", 16)
    ids, stream = tokens(2, 30), Stream(model, Scorer(model).continues)
    stream.read(ids[:, :26])
    for place in range(26, 30):
        logits = stream.read(ids[:, place : place + 1])
    with torch.inference_mode():
        torch.testing.assert_close(logits, model(ids, use_cache=False).logits[:, -1], atol=2e-5, rtol=1e-4)


def test_speed(folders: dict[str, Path], tmp_path: Path) -> None:
    folders["attention"] = save_model(tiny_model("full_attention"), tmp_path / "attention")
    measurement = Speed(lengths=(32, 128), repeats=2, new_tokens=3, batch_size=2)
    models = [(open_model(folder), tmp_path / f"out-{name}") for name, folder in folders.items()]
    turns: list[Advance] = []
    results = evaluate("speed", measurement, models, listener=turns.append)
    summaries = {name: found.summary or {} for name, found in zip(folders, results, strict=True)}
    state = {name: [one["state"] for one in summary["lengths"]] for name, summary in summaries.items()}
    assert state["sdm"][0] == state["sdm"][1]
    # Two layers of two key-value heads of eight channels, keys and values, float32, for every token of two rows.
    assert state["llama"] == [(length + 3) * 2 * 2 * 2 * 8 * 2 * 4 for length in (32, 128)]
    assert state["attention"][1] > state["attention"][0]
    for found in results:
        assert found.complete
        for one in found.units.values():
            assert one["prefill"] > 0
            assert one["decode"] > 0
            assert one["peak"] is None or one["peak"] >= 0
    # After the first announcements, one unit of each model at a time.
    names = [turn.name for turn in turns if turn.units]
    assert names == list(folders) * 4
    report = measurement.report(summaries)
    assert len(report.tables[0].rows) == 6
    assert {chart.name for chart in report.charts} == {"speed-prefill", "speed-decode", "speed-state", "speed-peak"}


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lengths must name at least one length"):
        Speed(lengths=())
    with pytest.raises(DataError, match="lengths must differ, got 8, 8"):
        Speed(lengths=(8, 8))
    with pytest.raises(UserError, match="repeats must be a positive integer, got 0"):
        Speed(repeats=0)
    lm = open_model(save_model(other_model("gpt2"), tmp_path / "gpt2"))
    with pytest.raises(UserError, match="gpt2 takes at most 128 tokens, got 160: lower --lengths or --new-tokens"):
        Speed(lengths=(128,), new_tokens=32).plan(lm)
