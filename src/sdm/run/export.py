"""The model of a run as a folder that transformers loads: safetensors, configuration, tokenizer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sdm.data.tokenization import Tokenizer
from sdm.errors import RankError, TrainingError
from sdm.files import (
    MANIFEST,
    DamagedFile,
    new_folder,
    read_json,
    read_manifest,
    remove_leftovers,
    write_json,
    write_manifest,
)
from sdm.models import SDMConfig, SDMForCausalLM
from sdm.models.saved_folder import CHAT_TEMPLATE, INDEX, WEIGHTS, no_progress_bar, write_chat_template
from sdm.ranks import ALONE, Ranks
from sdm.run.adapted_model import for_export

_WRITTEN = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "modeling_sdm.py",
    CHAT_TEMPLATE,
    INDEX,
    MANIFEST,
)
LARGEST_FILE = 5 * 10**9  # bytes, unless a single tensor is larger
_PART = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def export_model(
    model: PreTrainedModel,
    tokenizer: Tokenizer | None,
    folder: Path,
    ranks: Ranks = ALONE,
    tensors: Callable[[], dict[str, Tensor]] | None = None,
    chat_template: bool = False,
) -> Path:
    """Export a model as a folder that transformers loads. All ranks call it.

    An older export is replaced once the new one is complete; anything else in its place is refused.

    Args:
        model: the model, which may be sharded over the ranks.
        tokenizer: exported with the model, if there is one.
        folder: where to write.
        ranks: the processes that hold the model.
        tensors: returns the full tensors, or this rank's shards of them; None: those of the model.
        chat_template: whether to add a simple chat template to a tokenizer without one.

    Returns:
        The folder.
    """
    path = folder.resolve()

    def begin() -> Path:
        check_replaceable(path)
        remove_leftovers(path)
        return stack.enter_context(new_folder(path, replace=True))

    def complete() -> None:
        if tokenizer is not None:
            tokenizer.save(temporary)
            if chat_template:
                write_chat_template(temporary)
        write_manifest(temporary)
        stack.close()  # gives the folder its name

    try:
        with contextlib.ExitStack() as stack, no_progress_bar():
            temporary = ranks.on_rank0(begin)
            if ranks.size == 1:
                for_export(model).save_pretrained(temporary)
            else:
                _save_sharded(model, model_tensors(model) if tensors is None else tensors(), temporary, ranks)
            ranks.on_rank0(complete)
    except (TrainingError, RankError):
        raise
    except (OSError, SafetensorError, ValueError) as error:
        raise TrainingError(
            f"the model cannot be exported to {folder}: {error}; `sdm export RUN --output FOLDER` writes it elsewhere"
        ) from error
    return folder


def _save_sharded(model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Write what `model.save_pretrained(folder)` writes, by all ranks; no rank ever holds all weights.

    The weights are divided into files of bounded size. The ranks gather one tensor after the other; the rank whose file
    it belongs to keeps it until the file is complete.
    """
    files = assign_files(tensors, LARGEST_FILE)
    places = {name: file for file, names in files.items() for name in names}
    for number, (file, names) in enumerate(files.items()):
        own = number % ranks.size == ranks.rank
        gathered = {}
        for name in names:
            full = _full(tensors[name])
            if own:
                gathered[name] = full.detach().cpu().contiguous()
        ranks.gather_call(lambda: save_file(gathered, folder / file, {"format": "pt"}) if own else None)  # noqa: B023
    ranks.on_rank0(lambda: _write_rest(model, tensors, places, folder))


def assign_files(tensors: dict[str, Tensor], largest: int) -> dict[str, list[str]]:
    """Return the names of the tensors of each file, at most `largest` bytes a file unless one tensor is larger."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, x in tensors.items():
        if groups[-1] and size + _nbytes(x) > largest:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += _nbytes(x)
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _write_rest(model: PreTrainedModel, tensors: dict[str, Tensor], places: dict[str, str], folder: Path) -> None:
    if len(set(places.values())) > 1:
        total = sum(_nbytes(x) for x in tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    config = model.config
    config.architectures = [SDMForCausalLM.__name__]
    config.dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _full(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.full_tensor() if isinstance(x, DTensor) else x


def _nbytes(x: Tensor) -> int:
    """Bytes of the full tensor."""
    return x.numel() * x.element_size()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers that checkpoints and exports hold. Tied weights appear once."""
    saved = model.state_dict().keys()
    buffers = {name: x for name, x in model.named_buffers() if name in saved}
    return {name: x.detach() for name, x in (dict(model.named_parameters()) | buffers).items()}


def check_replaceable(folder: Path, option: str = "--output") -> None:
    """Raise a `TrainingError` unless the folder is empty, absent or an older export."""
    if Path.cwd().is_relative_to(folder):
        raise TrainingError(f"{option}: {folder} is the folder you are in, or holds it; name another one")
    present = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    foreign = [name for name in present if not _is_written(name, folder)]
    if present and not foreign and not _is_export(folder):
        foreign = present
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
    """Whether a folder holds a model of this library, or one of transformers with the manifest that an export has."""
    try:
        ours = read_json(folder / "config.json").get("model_type") == SDMConfig.model_type
        return ours or (folder / MANIFEST).is_file()
    except (OSError, DamagedFile):
        return False
