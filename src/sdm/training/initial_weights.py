"""Starting from the weights of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdm.data.tokenization import Tokenizer, load_tokenizer
from sdm.models import SDMConfig, SDMForCausalLM
from sdm.models.fingerprint import architecture
from sdm.models.manifest import check_manifest
from sdm.run.errors import TrainingError
from sdm.run.model import SavedModel

# Fields of the architecture that only say how the weights were first drawn, or repeat layer_types.
_FREE = {"local_layer", "tie_query_initialization"}


def load_weights(model: SDMForCausalLM, path: Path, tokenizer: Tokenizer | None) -> None:
    """Start from the weights of another run. Its architecture and its tokenizer must be those of this one."""
    try:
        saved = SavedModel(path)
        folder = saved.folder
        check_manifest(folder)
    except ValueError as error:
        raise TrainingError(f"init_from: {error}") from error
    theirs_known = tokenizer is not None and (folder / "tokenizer.json").is_file()
    if theirs_known and load_tokenizer(folder).fingerprint != tokenizer.fingerprint:  # type: ignore[union-attr]
        raise TrainingError(
            f"init_from: the tokenizer in {folder} is not that of this run's data; set data.tokenizer to {folder}"
        )
    try:
        loaded = saved.load()
    except ValueError as error:
        raise TrainingError(f"init_from: the model in {folder} cannot be loaded: {error}") from error
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
