"""The model of a run as a folder that transformers loads: safetensors, configuration, tokenizer."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor
from transformers.utils import logging

from sdm.data.loader import open_data
from sdm.data.tokenization import Tokenizer, load_tokenizer
from sdm.files import new_folder
from sdm.models import SDMConfig, SDMForCausalLM
from sdm.training.checkpoint import CheckpointStore
from sdm.training.config_file import read_config
from sdm.training.errors import TrainingError
from sdm.training.run_folder import CHECKPOINTS, CONFIG

EXPORT = "export"


def export_model(model: SDMForCausalLM, tokenizer: Tokenizer | None, folder: Path) -> Path:
    """Write the folder, replacing an older export only once the new one is complete."""
    fresh = folder.with_name(f".{folder.name}-new")
    shutil.rmtree(fresh, ignore_errors=True)
    with new_folder(fresh) as temporary, _no_progress_bar():
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save(temporary)
    older = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(older, ignore_errors=True)
    if folder.exists():
        folder.rename(older)
    fresh.rename(folder)
    shutil.rmtree(older, ignore_errors=True)
    return folder


def export_run(folder: Path, output: Path | None = None) -> Path:
    """Export the model of the newest good checkpoint of a run, finished or not."""
    config = read_config(folder / CONFIG)
    store = CheckpointStore(folder / CHECKPOINTS)
    state = store.newest(lambda message: print(message, file=sys.stderr))
    if state is None:
        raise TrainingError(f"the run in {folder} has no checkpoint yet")
    data = open_data(config.data, "train", config.schedule.steps)
    tokenizer = getattr(data, "tokenizer", None)
    model = SDMForCausalLM(config.model.build(data.vocab_size, None if tokenizer is None else tokenizer.eos_id))
    store.load(state["step"], {f"model.{name}": x for name, x in model_tensors(model).items()})
    return export_model(model, tokenizer, output or folder / EXPORT)


def model_tensors(model: SDMForCausalLM) -> dict[str, Tensor]:
    """The weights and buffers that a checkpoint holds. Tied weights appear once."""
    saved = model.state_dict().keys()
    buffers = {name: x for name, x in model.named_buffers() if name in saved}
    return {name: x.detach() for name, x in (dict(model.named_parameters()) | buffers).items()}


def exported_folder(path: Path) -> Path:
    """The folder with config.json: the one given, or the export within a run's."""
    for folder in (path, path / EXPORT):
        if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
            return folder
    raise TrainingError(f"init_from: {path} is neither a model's folder nor that of a finished run")


def load_weights(model: SDMForCausalLM, path: Path, tokenizer: Tokenizer | None) -> None:
    """Start from the weights of another run. Its sizes and its tokenizer must be those of this one."""
    folder = exported_folder(path)
    theirs = SDMConfig.from_pretrained(folder)
    for name in ("vocab_size", "hidden_size", "layer_types", "num_slots", "num_memory_heads", "intermediate_size"):
        if getattr(theirs, name) != getattr(model.config, name):
            raise TrainingError(
                f"init_from: the model in {folder} has {name} = {getattr(theirs, name)!r}, this run "
                f"{getattr(model.config, name)!r}"
            )
    theirs_known = tokenizer is not None and (folder / "tokenizer.json").is_file()
    if theirs_known and load_tokenizer(folder).fingerprint != tokenizer.fingerprint:  # type: ignore[union-attr]
        raise TrainingError(
            f"init_from: the tokenizer in {folder} is not that of this run's data; set data.tokenizer to {folder}"
        )
    with _no_progress_bar():
        loaded = SDMForCausalLM.from_pretrained(folder)
    model.load_state_dict(loaded.state_dict())


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A run has a display of its own."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
