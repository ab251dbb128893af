"""The model of a run as a folder that transformers loads: safetensors, configuration, tokenizer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from sdm.data.tokenization import Tokenizer
from sdm.errors import RankError
from sdm.files import DamagedFile, new_folder, read_json, remove_leftovers
from sdm.models import SDMConfig, SDMForCausalLM
from sdm.models.manifest import MANIFEST, read_manifest, write_manifest
from sdm.models.saved_folder import INDEX, no_progress_bar
from sdm.ranks import ALONE, Ranks
from sdm.run.errors import TrainingError
from sdm.run.shared_export import save_shared

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


def export_model(
    model: SDMForCausalLM,
    tokenizer: Tokenizer | None,
    folder: Path,
    ranks: Ranks = ALONE,
    shares: Callable[[], dict[str, Tensor]] | None = None,
) -> Path:
    """Write the folder, replacing an older export, and nothing else, only once the new one is complete. By all ranks
    that the model is dealt to; `shares` gives what this one has of the whole tensors, unless the model says it."""
    path = folder.resolve()

    def begin() -> Path:
        check_replaceable(path)
        remove_leftovers(path)
        return stack.enter_context(new_folder(path, replace=True))

    def complete() -> None:
        if tokenizer is not None:
            tokenizer.save(temporary)
        write_manifest(temporary)
        stack.close()  # gives the folder its name

    try:
        with contextlib.ExitStack() as stack, no_progress_bar():
            temporary = ranks.on_rank0(begin)
            if ranks.size == 1:
                model.save_pretrained(temporary)
            else:
                save_shared(model, model_tensors(model) if shares is None else shares(), temporary, ranks)
            ranks.on_rank0(complete)
    except (TrainingError, RankError):
        raise
    except (OSError, SafetensorError, ValueError) as error:
        raise TrainingError(
            f"the model cannot be exported to {folder}: {error}; `sdm export RUN --output FOLDER` writes it elsewhere"
        ) from error
    return folder


def model_tensors(model: SDMForCausalLM) -> dict[str, Tensor]:
    """The weights and buffers that checkpoints and exports hold. Tied weights appear once."""
    saved = model.state_dict().keys()
    buffers = {name: x for name, x in model.named_buffers() if name in saved}
    return {name: x.detach() for name, x in (dict(model.named_parameters()) | buffers).items()}


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
