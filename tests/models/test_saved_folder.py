"""A saved folder is read by transformers in a process that does not know this package yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sdm
from helpers import assert_identical
from tiny_models import STACKS, tiny_config, tiny_model, tokens
from tiny_tokenizer import tiny_tokenizer

FRESH_PROCESS = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

folder, ids = sys.argv[1], torch.tensor([[3, 1, 4, 1, 5]])

def error_of(**options):
    try:
        AutoModelForCausalLM.from_pretrained(folder, **options)
    except (ImportError, ValueError) as error:
        return str(error)

assert AutoTokenizer.from_pretrained(folder)("memory")["input_ids"] == [77, 69, 77, 79, 82, 89]
assert "sdm" not in sys.modules
assert "trust_remote_code=True" in error_of()

class NotInstalled:
    def find_spec(name, *args):
        if name == "sdm":
            raise ModuleNotFoundError("No module named 'sdm'", name="sdm")

sys.meta_path.insert(0, NotInstalled)
assert "needs the package sparse-delta-memory" in error_of(trust_remote_code=True)
sys.meta_path.remove(NotInstalled)

model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
import sdm
assert type(model) is sdm.SDMForCausalLM
assert AutoConfig.from_pretrained(folder).layer_types == model.config.layer_types
with torch.no_grad():
    torch.save(model(ids).logits, sys.argv[2])

# What is saved from here is loaded again: the classes have not changed into copies of themselves.
model.save_pretrained(sys.argv[3])
assert type(AutoModelForCausalLM.from_pretrained(sys.argv[3], trust_remote_code=True)) is sdm.SDMForCausalLM
"""


def test_a_fresh_process(tmp_path: Path) -> None:
    model, folder = tiny_model("shifted"), tmp_path / "model"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    result = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, folder, tmp_path / "logits", tmp_path / "again"],
        # Products of matrices are rounded by the number of threads.
        env=os.environ
        | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    with torch.no_grad():
        expected = model(torch.tensor([[3, 1, 4, 1, 5]])).logits
    assert_identical([torch.load(tmp_path / "logits", weights_only=True)], [expected])
    assert sorted(path.name for path in (tmp_path / "again").iterdir() if path.suffix == ".py") == ["modeling_sdm.py"]


@pytest.mark.parametrize("stack", STACKS)
def test_the_file_has_nothing_that_transformers_checks(stack: str, tmp_path: Path) -> None:
    config = tiny_config(stack)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "layer_types" not in written
    assert written["sdm_layer_types"] == config.layer_types
    loaded = sdm.SDMConfig.from_pretrained(tmp_path)
    assert loaded.layer_types == config.layer_types
    assert loaded.auto_map == {}, "it belongs to the file"
    assert sdm.SDMConfig.from_pretrained(tmp_path, global_layer_interval=2, global_layer="gdn").layer_types[1] == "gdn"


def test_files_of_earlier_versions(tmp_path: Path) -> None:
    config = tiny_config("mixed")
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    written["layer_types"] = written.pop("sdm_layer_types")
    del written["auto_map"]
    path.write_text(json.dumps(written))
    assert sdm.SDMConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


class OwnModel(sdm.SDMForCausalLM):
    """A user's own class, saved with its code as transformers does it."""


def test_a_class_of_ones_own_is_registered(tmp_path: Path) -> None:
    try:
        OwnModel.register_for_auto_class("AutoModelForCausalLM")
        OwnModel(tiny_config()).save_pretrained(tmp_path)
    finally:
        OwnModel._auto_class = None
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForCausalLM"].endswith(".OwnModel")
    assert auto_map["AutoConfig"] == "modeling_sdm.SDMConfig"
    assert sdm.SDMConfig.from_pretrained(tmp_path).auto_map == {
        "AutoModelForCausalLM": auto_map["AutoModelForCausalLM"]
    }


def test_registering_our_own_classes_changes_nothing(tmp_path: Path) -> None:
    sdm.SDMConfig.register_for_auto_class()
    sdm.SDMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    model = tiny_model()
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.py")] == ["modeling_sdm.py"]
    ids = tokens(1, 4)
    assert_identical([sdm.SDMForCausalLM.from_pretrained(tmp_path)(ids).logits], [model(ids).logits])
