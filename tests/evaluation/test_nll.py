"""Likelihood of documents: what the logits say, whatever the batch, and per byte."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from evaluation.conftest import other_model, save_model
from sdm.data import DataError
from sdm.errors import UserError
from sdm.evaluation import nll
from sdm.evaluation.eval_model import EvalModel, open_model
from sdm.evaluation.measurement import Advance, evaluate
from sdm.evaluation.nll import Likelihood
from training.runs import recall_run, text_run, train


def by_hand(lm: EvalModel, text: str) -> float:
    """The nats of a text in one pass."""
    ids = torch.tensor([lm.encode_prompt(text)])
    with torch.inference_mode():
        logits = lm.model(ids[:, :-1], use_cache=False).logits
    return float(F.cross_entropy(logits[0].double(), ids[0, 1:], reduction="sum"))


@pytest.mark.parametrize("kind", ["sdm", "llama"])
def test_documents(
    kind: str, folders: dict[str, Path], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each document by itself, also where it is read in stretches of time and beside others."""
    lm = open_model(folders[kind])
    measurement = Likelihood(data=(str(texts),))
    results = evaluate("nll", measurement, [(lm, tmp_path / "whole")])[0]
    assert results.complete
    assert len(results.units) == 6
    for number in range(6):
        text = (texts / f"{number}.txt").read_text()
        one = results.units[f"{texts}:{number}.txt"]
        assert one["nll"] == pytest.approx(by_hand(lm, text), rel=1e-5)
        assert one["tokens"] == one["bytes"] == len(text)
    monkeypatch.setattr("sdm.evaluation.nll.TOKENS", 50)
    again = evaluate("nll", measurement, [(lm, tmp_path / "again")])[0]
    for key, one in results.units.items():
        assert again.units[key]["nll"] == pytest.approx(one["nll"], rel=1e-5)
    assert results.summary is not None
    tokens = sum(one["tokens"] for one in results.units.values())
    nats = sum(one["nll"] for one in results.units.values())
    assert results.summary["tokens"] == tokens
    assert results.summary["nll"] == pytest.approx(nats / tokens)
    assert results.summary["perplexity"] == pytest.approx(math.exp(nats / tokens))
    assert results.summary["bits_per_byte"] == pytest.approx(nats / tokens / math.log(2))


def test_bytes_are_those_of_the_text(tmp_path: Path) -> None:
    """Several bytes a character, and pieces of a document by themselves."""
    train(text_run(tmp_path), tmp_path / "run")
    lm = open_model(tmp_path / "run")
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps({"text": "größer"}) + "\n" + json.dumps({"text": "größer größer"}) + "\n")
    results = evaluate("nll", Likelihood(data=(str(file),), context=8), [(lm, tmp_path / "out")])[0]
    assert [one["bytes"] for one in results.units.values()] == [8, 17]
    whole = by_hand(lm, "größer")
    assert results.units[f"{file}:other.jsonl:1"]["nll"] == pytest.approx(whole, rel=1e-5)
    second = sum(by_hand(lm, piece) for piece in ("größer", " größe", "r"))  # eight bytes at a time
    assert results.units[f"{file}:other.jsonl:2"]["nll"] == pytest.approx(second, rel=1e-5)
    assert results.data["sources"][0]["split"] == "all"


def test_a_run_is_measured_on_what_was_held_out(tmp_path: Path) -> None:
    config = text_run(tmp_path)
    train(config, tmp_path / "run")
    lm = open_model(tmp_path / "run")
    results = evaluate("nll", Likelihood(), [(lm, tmp_path / "own")])[0]
    assert results.data["sources"][0]["split"] == "test"
    assert results.data["sources"][0]["test_fraction"] == 0.1
    assert all(key.endswith("#test") for key in results.units)
    train(recall_run(), tmp_path / "task")
    with pytest.raises(UserError, match="--data: task is no run that was trained on text"):
        Likelihood().plan(open_model(tmp_path / "task"))


def test_what_cannot_be_measured(folders: dict[str, Path], tmp_path: Path) -> None:
    lm = open_model(folders["sdm"])
    file = tmp_path / "broken.jsonl"
    file.write_text('{"text": "fine"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"broken\.jsonl, line 2 has no text under 'text'"):
        Likelihood(data=(str(file),)).plan(lm)
    file.write_text('{"text": "fine"}\n\n{"text": "cut\n')
    with pytest.raises(DataError, match=r"broken\.jsonl, line 3 is not JSON"):
        Likelihood(data=(str(file),)).plan(lm)
    with pytest.raises(UserError, match="context must be a positive integer, got 0"):
        Likelihood(context=0)
    short = open_model(save_model(other_model("gpt2"), tmp_path / "gpt2"))
    long = tmp_path / "long.txt"
    long.write_text("word " * 40)
    with pytest.raises(UserError, match=r"gpt2 takes at most 128 tokens, got 200: 'long\.txt' is longer; .* --context"):
        evaluate("nll", Likelihood(data=(str(long),)), [(short, tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    bare = open_model(save_model(other_model("gpt2"), tmp_path / "bare", tokenizer=False))
    with pytest.raises(UserError, match=r"bare has no tokenizer in .*, which measuring on text needs"):
        evaluate("nll", Likelihood(data=(str(long),)), [(bare, tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    cut = evaluate("nll", Likelihood(data=(str(long),), context=128), [(short, tmp_path / "cut")])[0]
    assert cut.units[f"{long}:long.txt"]["tokens"] == 200


def test_white_space_that_a_tokenizer_drops(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document without tokens counts for nothing."""
    lm = open_model(folders["sdm"])
    own = lm.encode
    monkeypatch.setattr(lm, "encode", lambda text: own(text.strip()))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "blank.txt").write_text(" \n ")
    with pytest.raises(UserError, match="the documents have no tokens"):
        evaluate("nll", Likelihood(data=(str(tmp_path / "in"),)), [(lm, tmp_path / "blank")])
    (tmp_path / "in" / "words.txt").write_text("three little words")
    found = evaluate("nll", Likelihood(data=(str(tmp_path / "in"),)), [(lm, tmp_path / "out")])[0]
    assert found.summary is not None
    assert (found.summary["documents"], found.summary["tokens"], found.summary["bytes"]) == (1, 18, 18)
    assert len(found.units) == 2


def test_progress_within_a_document(
    folders: dict[str, Path], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long document does not stand still, and what is done never falls."""
    monkeypatch.setattr(nll, "TOKENS", 64)
    told: list[Advance] = []
    models = [(open_model(folders["sdm"]), tmp_path / "out")]
    evaluate("nll", Likelihood(data=(str(texts),)), models, listener=told.append)
    done = [one.done for one in told]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, told[0].total)
    assert len({*done}) > 10
    assert max(y - x for x, y in itertools.pairwise(done)) < told[0].total / 5
