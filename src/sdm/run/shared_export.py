"""A model that is dealt to ranks, written as the folder that transformers loads, though no rank ever holds all of it.

The weights are cut into files of bounded size. The ranks gather one tensor after the other; the rank whose file it
belongs to keeps it until the file is complete, and then writes the next of its own.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from sdm.files import write_json
from sdm.models import SDMForCausalLM
from sdm.models.saved_folder import INDEX, WEIGHTS
from sdm.ranks import Ranks

LARGEST_FILE = 5 * 10**9  # bytes, unless a single tensor is larger


def save_shared(model: SDMForCausalLM, tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """What `model.save_pretrained(folder)` writes, by all ranks. `tensors` are the ranks' shares of the weights."""
    files = plan(tensors, LARGEST_FILE)
    places = {name: file for file, names in files.items() for name in names}
    for number, (file, names) in enumerate(files.items()):
        own = number % ranks.size == ranks.rank
        gathered = {}
        for name in names:
            whole = _whole(tensors[name])
            if own:
                gathered[name] = whole.detach().cpu().contiguous()
        ranks.gather_call(lambda: save_file(gathered, folder / file, {"format": "pt"}) if own else None)  # noqa: B023
    ranks.on_rank0(lambda: _write_rest(model, tensors, places, folder))


def plan(tensors: dict[str, Tensor], largest: int) -> dict[str, list[str]]:
    """Which tensors each file holds."""
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


def _write_rest(model: SDMForCausalLM, tensors: dict[str, Tensor], places: dict[str, str], folder: Path) -> None:
    if len(set(places.values())) > 1:
        total = sum(_nbytes(x) for x in tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    config = model.config
    config.architectures = [SDMForCausalLM.__name__]
    config.dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _whole(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.full_tensor() if isinstance(x, DTensor) else x


def _nbytes(x: Tensor) -> int:
    """Of all ranks."""
    return x.numel() * x.element_size()
