"""The model of a run as a folder that transformers loads: safetensors, configuration, tokenizer."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from sdm.data.config import CorpusConfig
from sdm.data.loader import open_data
from sdm.data.tokenization import Tokenizer, load_tokenizer
from sdm.files import DamagedFile, new_folder, read_json, remove_leftovers
from sdm.models import SDMConfig, SDMForCausalLM
from sdm.models.fingerprint import architecture
from sdm.models.manifest import MANIFEST, check_manifest, read_manifest, write_manifest
from sdm.models.saved_folder import INDEX, WEIGHTS, load_model, no_progress_bar
from sdm.training.checkpoint import CheckpointStore
from sdm.training.errors import TrainingError
from sdm.training.run_folder import CHECKPOINTS, CONFIG, configuration, has_begun, recorded_tokenizer

EXPORT = "export"
_WRITTEN = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "modeling_sdm.py",
    INDEX,
    MANIFEST,
)
_PART = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
# Fields of the architecture that only say how the weights were first drawn, or repeat layer_types.
_FREE = {"local_layer", "tie_query_initialization"}


def export_model(model: SDMForCausalLM, tokenizer: Tokenizer | None, folder: Path) -> Path:
    """Write the folder, replacing an older export, and nothing else, only once the new one is complete."""
    try:
        path = folder.resolve()
        check_replaceable(path)
        remove_leftovers(path)
        with new_folder(path, replace=True) as temporary, no_progress_bar():
            model.save_pretrained(temporary)
            if tokenizer is not None:
                tokenizer.save(temporary)
            write_manifest(temporary)
    except TrainingError:
        raise
    except (OSError, SafetensorError, ValueError) as error:
        raise TrainingError(
            f"the model cannot be exported to {folder}: {error}; `sdm export RUN --output FOLDER` writes it elsewhere"
        ) from error
    return folder


def check_replaceable(folder: Path, option: str = "--output") -> None:
    """Only a folder that holds an older export, or nothing, may be replaced."""
    if Path.cwd().is_relative_to(folder):
        raise TrainingError(f"{option}: {folder} is the folder you are in, or holds it; name another one")
    found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    foreign = [name for name in found if not _is_written(name, folder)]
    if found and not foreign and not _is_export(folder):
        foreign = found
    if foreign:
        raise TrainingError(
            f"{option}: {folder} would be replaced, but {foreign[0]} in it is not of an export; name a new folder, or "
            "move what is there"
        )


def _is_written(name: str, folder: Path) -> bool:
    """Whether a file's name is one that an export has; its manifest knows them all."""
    with contextlib.suppress(OSError, ValueError):
        return name == MANIFEST or name in read_manifest(folder)
    return name in _WRITTEN or _PART.fullmatch(name) is not None


def _is_export(folder: Path) -> bool:
    try:
        return read_json(folder / "config.json").get("model_type") == SDMConfig.model_type
    except (OSError, DamagedFile):
        return False


def export_run(folder: Path, output: Path | None = None) -> Path:
    """Export the model of the newest good checkpoint of a run, finished or not."""
    model, tokenizer, _ = restore_run(folder)
    return export_model(model, tokenizer, output or folder / EXPORT)


def is_unfinished(folder: Path) -> bool:
    """Whether a folder is that of a run without the export that its end writes."""
    if not (folder / CONFIG).is_file():
        return False
    # An export from before the end is there too if the user asked for one, and is older than the newest checkpoint.
    last = configuration(folder).schedule.steps
    reached = max(CheckpointStore(folder / CHECKPOINTS).steps(), default=None)
    return not (folder / EXPORT / "config.json").is_file() or (reached is not None and reached < last)


def restore_run(folder: Path) -> tuple[SDMForCausalLM, Tokenizer | None, int]:
    """The model of a run's newest good checkpoint, its tokenizer if it has one, and the step."""
    config = configuration(folder)
    if not has_begun(folder):
        raise TrainingError(f"the run in {folder} has no checkpoint yet")
    recorded = recorded_tokenizer(folder) if isinstance(config.data, CorpusConfig) else None
    tokenizer: Tokenizer | None
    if recorded is not None:
        tokenizer = load_tokenizer(recorded)
        vocab_size = tokenizer.vocab_size
    else:  # a task's run, or one of an older version
        data = open_data(config.data, "train", config.schedule.steps)
        tokenizer, vocab_size = getattr(data, "tokenizer", None), data.vocab_size
    model = SDMForCausalLM(config.model.build(vocab_size, None if tokenizer is None else tokenizer.eos_id))
    tensors = {f"model.{name}": x for name, x in model_tensors(model).items()}
    store = CheckpointStore(folder / CHECKPOINTS)
    state = store.newest(
        lambda message: print(message, file=sys.stderr), lambda state: store.load(state["step"], tensors)
    )
    assert state is not None, "it has begun"
    return model, tokenizer, state["step"]


def model_tensors(model: SDMForCausalLM) -> dict[str, Tensor]:
    """The weights and buffers that a checkpoint holds. Tied weights appear once."""
    saved = model.state_dict().keys()
    buffers = {name: x for name, x in model.named_buffers() if name in saved}
    return {name: x.detach() for name, x in (dict(model.named_parameters()) | buffers).items()}


def exported_folder(path: Path) -> Path:
    """The folder with config.json: the one given, or the export within a run's."""
    for folder in (path, path / EXPORT):
        if (folder / "config.json").is_file() and any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
            return folder
    raise TrainingError(f"init_from: {path} is neither a model's folder nor that of a finished run")


def load_weights(model: SDMForCausalLM, path: Path, tokenizer: Tokenizer | None) -> None:
    """Start from the weights of another run. Its architecture and its tokenizer must be those of this one."""
    folder = exported_folder(path)
    try:
        check_manifest(folder)
    except ValueError as error:
        raise TrainingError(f"init_from: {error}") from error
    theirs_known = tokenizer is not None and (folder / "tokenizer.json").is_file()
    if theirs_known and load_tokenizer(folder).fingerprint != tokenizer.fingerprint:  # type: ignore[union-attr]
        raise TrainingError(
            f"init_from: the tokenizer in {folder} is not that of this run's data; set data.tokenizer to {folder}"
        )
    loaded = _load(folder)
    theirs, ours = _architecture(loaded.config), _architecture(model.config)
    for name, value in ours.items():
        if theirs[name] != value:
            raise TrainingError(
                f"init_from: the model in {folder} has {name} = {theirs[name]!r}, this run {value!r}; they must agree"
            )
    try:
        model.load_state_dict(loaded.state_dict())
    except RuntimeError as error:
        raise TrainingError(f"init_from: the weights in {folder} are not those of this run's model: {error}") from error


def _architecture(config: SDMConfig) -> dict[str, Any]:
    """What gives the weights their meaning."""
    named = architecture(config) | {"tie_word_embeddings": config.tie_word_embeddings}
    return {name: value for name, value in named.items() if name not in _FREE}


def _load(folder: Path) -> SDMForCausalLM:
    try:
        return load_model(folder)
    except ValueError as error:
        raise TrainingError(f"init_from: the model in {folder} cannot be loaded: {error}") from error
