"""Measurements agree with what a plain forward pass says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sdm.data import Batch, MQARTaskConfig, RecallConfig, open_corpus
from sdm.errors import UserError
from sdm.evaluation.likelihood import likelihood, token_nll
from sdm.evaluation.position import document_batches, doubling_edges, nll_by_position
from sdm.evaluation.registry import MEASUREMENTS, Measurement, measure
from tiny_models import VOCABULARY, tiny_model
from training.runs import text_run


def test_token_nll() -> None:
    model = tiny_model()
    ids = torch.randint(0, VOCABULARY, (2, 12))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    nll = token_nll(model, Batch(ids, targets))
    with torch.no_grad():
        expected = F.cross_entropy(model(ids).logits.transpose(1, 2), targets, reduction="none")
    assert torch.allclose(nll, expected, atol=1e-5)
    mean = likelihood(model, [Batch(ids, targets)] * 2)
    assert mean.tokens == 44
    assert mean.nll == pytest.approx(float(expected.sum()) / 22, rel=1e-5)
    assert mean.perplexity > 1


def test_nll_by_position(tmp_path: Path) -> None:
    corpus = open_corpus(text_run(tmp_path).data, "train")  # type: ignore[arg-type]
    store = corpus.stores[0]
    batches = list(document_batches(store, 100))
    assert sum(len(batch.input_ids) for batch in batches) == int((store.lengths > 100).sum())
    assert torch.equal(batches[0].input_ids[:, 1:], batches[0].targets[:, :-1])
    model = tiny_model(vocab_size=257)
    edges = doubling_edges(100, 16)
    assert edges == [0, 16, 32, 64, 100]
    bins = nll_by_position(model, batches, edges)
    total = sum(one.nll * one.tokens for one in bins) / sum(one.tokens for one in bins)
    assert total == pytest.approx(likelihood(model, batches).nll, rel=1e-5)


def test_what_cannot_be_measured() -> None:
    model, ids = tiny_model(), torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"batch\.reset: .* state is not carried"):
        token_nll(model, Batch(ids, ids, reset=torch.tensor([True, False])))
    with pytest.raises(ValueError, match="no document is longer than 64 tokens"):
        nll_by_position(model, [], doubling_edges(64))


MQAR = MQARTaskConfig(vocab_size=64, train_segments=((16, 2, 8),), test_segments=((16, 2), (16, 4)), batch_size=8)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_measurements(name: str, tmp_path: Path) -> None:
    """Each gives plain JSON, and refuses data that it is not of."""
    corpus = replace(text_run(tmp_path).data, test_fraction=0.5)
    data = {"recall": RecallConfig(num_keys=20, num_pairs=8), "mqar": MQAR}.get(name, corpus)
    model = tiny_model(vocab_size=257)
    result = measure(name, model, data)
    assert json.loads(json.dumps(result)) == result
    assert result.keys() >= ({"accuracy"} if name in ("recall", "mqar") else {"nll", "tokens"})
    other = corpus if name in ("recall", "mqar") else MQAR
    with pytest.raises(UserError, match=f"{name} is measured on {type(data).__name__}, got data of"):
        measure(name, model, other)


def test_a_measurement_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        MEASUREMENTS, "layers", Measurement(RecallConfig, lambda model, data: {"n": len(model.model.layers)})
    )
    assert measure("layers", tiny_model(), RecallConfig()) == {"n": 4}
    with pytest.raises(
        UserError, match="there is no measurement 'taste'; there are nll, position, recall, mqar, layers"
    ):
        measure("taste", tiny_model(), RecallConfig())
