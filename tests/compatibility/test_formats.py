"""Files of version 1 of every format are read, and give the numbers that they gave when they were written.

Numbers are compared within the tolerance of float32: the files may have been written on another processor.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import sdm
from sdm.data import DataError, TokenStore, load_tokenizer, shards
from sdm.errors import UserError
from sdm.evaluation import results as results_file
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.measurement import evaluate
from sdm.evaluation.results import read_results
from sdm.files import read_json
from sdm.models import SDMForCausalLM, state_file
from sdm.run import Run, checkpoint
from sdm.run.checkpoint import CheckpointError
from sdm.run.model import SavedModel
from sdm.training import Trainer


def load_make() -> ModuleType:
    """The script that wrote the files: it is not a module of the tests."""
    spec = importlib.util.spec_from_file_location("compatibility_make", Path(__file__).with_name("make.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_make()
EXPECTED: dict[str, Any] = read_json(make.DATA / "expected.json")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(make.DATA, tmp_path / "data"))


def model_of(data: Path) -> SDMForCausalLM:
    return SDMForCausalLM.from_pretrained(data / "run" / "export").eval()


def test_a_run_is_resumed(data: Path) -> None:
    run = Run(data / "run")
    assert run.config() == run.written_config() == make.CONFIG
    assert not run.is_finished()
    Trainer(run.config(), run.folder).run()
    assert run.is_finished()
    resumed = make.losses(run.folder)
    assert len(resumed) == make.CONFIG.schedule.steps - make.STOPPED_AT
    torch.testing.assert_close(resumed, EXPECTED["losses"][make.STOPPED_AT :], rtol=1e-4, atol=1e-5)


def test_an_export_and_a_checkpoint_hold_the_same_model(data: Path) -> None:
    tokens = make.READ + make.NEXT
    for model in (model_of(data), SavedModel(data / "run").load()):
        torch.testing.assert_close(make.logits(model, tokens), EXPECTED["logits"], rtol=1e-4, atol=1e-5)


def test_a_state_continues_its_stream(data: Path) -> None:
    model, expected = model_of(data), EXPECTED["logits"]
    state = sdm.MemoryState.load(data / "stream.sdm", model)
    assert len(state) == len(make.READ)
    assert state.pending == tuple(make.NEXT[:1])
    continued = make.logits(model, make.NEXT, state.cache(model))
    torch.testing.assert_close(continued, expected[len(make.READ) :], rtol=1e-4, atol=1e-5)
    back = state.rewind(model, make.HISTORY)
    again = make.logits(model, make.READ[-make.HISTORY :], back.cache(model))
    torch.testing.assert_close(again, expected[len(make.READ) - make.HISTORY : len(make.READ)], rtol=1e-4, atol=1e-5)


def test_results_are_read_and_measured_again(data: Path, tmp_path: Path) -> None:
    stored = read_results(data / "run" / "evaluations" / "recall")
    assert stored.complete
    assert {"summary": stored.summary, "units": stored.units} == EXPECTED["recall"]
    (again,) = evaluate("recall", make.MEASUREMENT, [(open_model(data / "run"), tmp_path / "again")])
    assert again.units == stored.units


def test_tokens_and_their_tokenizer_are_read(data: Path) -> None:
    store, tokenizer = TokenStore(data / "tokens"), load_tokenizer(data / "tokenizer")
    documents = [store.document(number).tolist() for number in range(store.num_documents)]
    assert documents == EXPECTED["documents"]
    assert [tokenizer.decode(document) for document in documents] == make.TEXTS
    assert [[tokenizer.eos_id, *tokenizer.encode(text)] for text in make.TEXTS] == documents
    assert store.manifest["tokenizer"] == tokenizer.fingerprint


def test_other_versions_are_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(data)
    assert (shards.FORMAT, results_file.FORMAT, checkpoint.FORMAT, state_file.VERSION) == (1, 1, 1, 1)
    monkeypatch.setattr(shards, "FORMAT", 2)
    with pytest.raises(DataError, match=r"tokens has format 1, expected 2; delete it to tokenise again"):
        TokenStore(data / "tokens")
    monkeypatch.setattr(results_file, "FORMAT", 2)
    with pytest.raises(UserError, match=r"results\.json has format 1, expected 2; measure it again in another folder"):
        read_results(data / "run" / "evaluations" / "recall")
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(CheckpointError, match=r"has format 1, this version of sdm reads 2"):
        checkpoint.verify(Run(data / "run").checkpoints().path(make.STOPPED_AT))
    monkeypatch.setattr(state_file, "VERSION", 2)
    with pytest.raises(ValueError, match=r"stream\.sdm.* has format version 1, this version of sdm reads 2"):
        sdm.MemoryState.load(data / "stream.sdm", model)
