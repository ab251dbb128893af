"""An export is what was trained, replaces nothing else, and starts other runs."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from transformers import AutoTokenizer

from sdm.data import DataError
from sdm.errors import TrainingError
from sdm.models import SDMForCausalLM
from sdm.run.checkpoint import CheckpointStore
from sdm.run.config import CheckpointConfig
from sdm.run.model import export_run
from sdm.training import Trainer
from training.runs import MODEL, assert_same, recall_run, text_run, train


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def bpe_run(folder: Path) -> Any:
    config = text_run(folder)
    return replace(config, data=replace(config.data, tokenizer="bpe:270"))


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.txt": "years of work"},
        {"config.json": '{"model_type": "sdm"}', "model.safetensors": "", "notes.md": ""},
        {"config.json": '{"model_type": "llama"}', "model.safetensors": "the weights of another model"},
        {"config.json": "[", "tokenizer.json": ""},
        {"config.json": '{"model_type": "sdm"}', "sub/file.safetensors": ""},
        {"config.json": '{"model_type": "sdm"}', "model.safetensors": "", "unrelated.safetensors": "of another model"},
        {"config.json": '{"model_type": "sdm"}', "manifest.json": '{"config.json": 1}', "model.safetensors": "mine"},
    ],
)
def test_only_an_export_is_replaced(tmp_path: Path, files: dict[str, str]) -> None:
    train(recall_run(), tmp_path / "run")
    output = tmp_path / "output"
    for name, text in files.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(text)
    before = content(tmp_path)
    with pytest.raises(TrainingError, match=r"--output: .*output would be replaced"):
        export_run(tmp_path / "run", output)
    assert content(tmp_path) == before
    shutil.rmtree(output)
    output.mkdir()
    for _ in range(2):  # into an empty folder, and over an older export
        assert export_run(tmp_path / "run", output) == output
    written = {"config.json", "generation_config.json", "manifest.json", "model.safetensors", "modeling_sdm.py"}
    assert {path.name for path in output.iterdir()} == written


def test_teammates_may_read_what_a_run_leaves(tmp_path: Path) -> None:
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    train(text_run(tmp_path), tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {".safetensors", ".json"} <= {path.suffix for path in files}
    for path in files:
        assert path.stat().st_mode == ordinary.stat().st_mode, path


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(recall_run(), tmp_path / "run")
    run = tmp_path / "run"
    (tmp_path / "file").write_text("x")
    (tmp_path / "here" / "deeper").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "deeper")
    for output in (".", "..", "/"):
        with pytest.raises(TrainingError, match=r"--output: .* is the folder you are in"):
            export_run(run, Path(output))
    for output in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/export")):
        with pytest.raises(TrainingError, match="cannot be exported"):
            export_run(run, output)
    assert (tmp_path / "file").read_text() == "x"


def test_full_disk_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(SDMForCausalLM, "save_pretrained", full)
    with pytest.raises(TrainingError, match=r"cannot be exported.*No space left"):
        Trainer(recall_run(), tmp_path).run()
    monkeypatch.undo()
    train(recall_run(), tmp_path)
    assert (tmp_path / "export" / "config.json").is_file()


def test_the_tokenizer_is_that_of_the_run(tmp_path: Path) -> None:
    """Whatever became of the text that a BPE was trained on."""
    config = bpe_run(tmp_path)
    weights = train(config, tmp_path / "run")
    assert_same(train(config, tmp_path / "run"), weights)
    before = content(tmp_path / "run" / "export")
    for file in (tmp_path / "texts").iterdir():
        file.write_text("quite another text, of other words. " * 20)
    with pytest.raises(DataError, match="the data changed since this state was saved: its text"):
        Trainer(config, tmp_path / "run").run()
    shutil.rmtree(tmp_path / "texts")
    shutil.rmtree(tmp_path / "cache")
    assert content(export_run(tmp_path / "run", tmp_path / "again")) == before
    ids = AutoTokenizer.from_pretrained(tmp_path / "again")("a memory of many slots")["input_ids"]
    assert max(ids) > 257  # merges
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    bpe_run(tmp_path)
    with pytest.raises(TrainingError, match=r"is not what the run started with"):
        export_run(tmp_path / "run", tmp_path / "old")


def test_a_run_goes_on_without_what_it_began_from(tmp_path: Path) -> None:
    first = text_run(tmp_path)
    train(first, tmp_path / "first")
    origin = tmp_path / "first" / "export"
    config = replace(first, init_from=origin, data=replace(first.data, tokenizer=str(origin)))
    expected = train(config, tmp_path / "whole")
    trainer = Trainer(config, tmp_path / "split")
    loaded = SDMForCausalLM.from_pretrained(origin).state_dict()
    assert_same({name: x.detach() for name, x in trainer.model.state_dict().items()}, loaded)
    for _ in range(4):
        trainer.train_step()
    trainer.save()
    trainer.close()
    shutil.rmtree(tmp_path / "first")
    assert_same(train(config, tmp_path / "split"), expected)
    with pytest.raises(TrainingError, match="init_from"):
        Trainer(replace(config, data=first.data), tmp_path / "new")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    train(recall_run(), tmp_path / "first")
    for field, value in {
        "memory_temperature": 2.0,
        "memory_update": "slot",
        "memory_weighting": "l2",
        "num_reads": 2,
        "num_attention_heads": 2,
        "decay_per_write": True,
        "learned_initial_state": False,
        "tie_word_embeddings": True,
    }.items():
        other = recall_run(model=replace(MODEL, **{field: value}), init_from=tmp_path / "first")
        with pytest.raises(TrainingError, match=rf"init_from: the model in .* has {field} = .*they must agree"):
            Trainer(other, tmp_path / "second")


def test_weights_may_come_in_parts(tmp_path: Path) -> None:
    """And what only says how weights are first drawn, or computed, may differ."""
    weights = train(recall_run(), tmp_path / "first")
    model = SDMForCausalLM.from_pretrained(tmp_path / "first" / "export")
    model.save_pretrained(tmp_path / "parts", max_shard_size="4KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").is_file()
    other = replace(MODEL, tie_query_initialization=True, initial_state_std=0.1, backend="reference")
    trainer = Trainer(recall_run(model=other, init_from=tmp_path / "parts"), tmp_path / "second")
    assert_same({name: x.detach() for name, x in trainer.model.state_dict().items()}, weights)
    trainer.close()


def test_damaged_models_are_refused(tmp_path: Path) -> None:
    train(recall_run(), tmp_path / "first")
    export = tmp_path / "first" / "export"
    config = recall_run(init_from=export)

    def refused(message: str) -> None:
        with pytest.raises(TrainingError, match=rf"init_from: .*{message}"):
            Trainer(config, tmp_path / "second")

    model = SDMForCausalLM.from_pretrained(export)
    tensors = {name: x for name, x in model.state_dict().items() if name != "model.norm.weight"}
    shutil.rmtree(export)
    model.save_pretrained(export, state_dict=tensors)
    refused("missing: model.norm.weight")
    (export / "model.safetensors").write_bytes(b"rubbish")
    refused("cannot be loaded")
    values = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(values | {"num_slots": 5}))
    refused("cannot be loaded")


def test_full_disk_when_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever file it shows."""

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("run.folder.write_config", "run.folder.os.open", "training.trainer.Monitor"):
        with monkeypatch.context() as patch:
            patch.setattr(f"sdm.{name}", full)
            with pytest.raises(TrainingError, match=r"cannot start: .*No space left"):
                Trainer(recall_run(), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match=r"cannot start: .*file"):
        Trainer(recall_run(), tmp_path / "file")
    train(recall_run(), tmp_path)


def test_damaged_exports_are_refused(tmp_path: Path) -> None:
    """Every file is what was exported, and there is no other that transformers might read."""
    train(recall_run(), tmp_path / "first")
    export = tmp_path / "first" / "export"
    config = recall_run(init_from=export)
    (export / "README.md").write_text("a model of mine")
    Trainer(config, tmp_path / "second").close()
    weights = export / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(TrainingError, match=r"model.safetensors is damaged.*export the model again"):
        Trainer(config, tmp_path / "second")
    weights.write_bytes(whole)
    (export / "adapter_config.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"adapter_config.json is not of the export"):
        Trainer(config, tmp_path / "second")


def test_a_run_that_goes_on_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only checkpoint is replaced while it is read."""
    config = recall_run(checkpoint=CheckpointConfig(every=1, keep=1))
    trainer = Trainer(config, tmp_path)
    trainer.train_step()
    trainer.save()

    def load(store: CheckpointStore, step: int, tensors: Any) -> None:
        if trainer.step < 4:
            trainer.train_step()
            trainer.save()
        whole(store, step, tensors)

    whole = CheckpointStore.load
    monkeypatch.setattr(CheckpointStore, "load", load)
    exported = SDMForCausalLM.from_pretrained(export_run(tmp_path, tmp_path / "exported"))
    assert trainer.step == 4
    trained = {name: x.detach() for name, x in trainer.model.state_dict().items()}
    assert_same(dict(exported.state_dict()), trained)
    trainer.close()


def test_a_killed_export_leaves_nothing_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(recall_run(), tmp_path / "run")
    for name in (".export-0123abcd", ".out-0123abcd", ".out-mine"):
        (tmp_path / ("run" if "export" in name else ".") / name).mkdir()
    export_run(tmp_path / "run", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out", ".out-mine"}
    Trainer(recall_run(), tmp_path / "run").close()
    assert not list((tmp_path / "run").glob(".export*"))
