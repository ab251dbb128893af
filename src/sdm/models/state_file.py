"""The file format of `sdm.MemoryState`: safetensors, with what it takes to recognise a file in the header."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sdm.files import new_file
from sdm.models.fingerprint import Fingerprint

FORMAT = "sdm-memory-state"
VERSION = 1


def write(
    path: str | PathLike[str],
    tensors: dict[str, Tensor],
    model_id: Fingerprint,
    length: int,
    pending: tuple[int, ...],
) -> None:
    path = Path(path)
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    header = {
        "version": VERSION,
        "length": length,
        "pending": list(pending),
        "model": asdict(model_id),
        "sha256": _digest(tensors),
    }
    with new_file(path) as temporary:
        save_file(tensors, temporary, metadata={"format": FORMAT, "header": json.dumps(header)})


def read(path: str | PathLike[str], model_id: Fingerprint) -> tuple[dict[str, Tensor], int, list[int]]:
    """The tensors, the number of tokens and the tokens to come, after every check that the file itself allows."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no state file {os.fspath(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise _error(path, "it is a safetensors file, but not a saved MemoryState")
            header = _parse(path, metadata)
            Fingerprint(**header["model"]).check(model_id, f"the state file {os.fspath(path)!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    except (SafetensorError, OSError) as error:
        raise _error(path, f"it is damaged, incomplete or of another format ({error})") from error
    if _digest(tensors) != header["sha256"]:
        raise _error(path, "it is damaged: the contents do not match their checksum")
    return tensors, header["length"], header["pending"]


def take_slots(
    path: str | PathLike[str], layer: int, found: dict[str, Tensor], slots: int, channels: int
) -> tuple[Tensor, Tensor]:
    """Takes the changed rows of a table out of the tensors of a layer: slots [n] and rows [n,D]."""
    if not {"slots", "rows"} <= set(found):
        raise _error(path, f"layer {layer} needs slots and rows, got {sorted(found)}")
    index, rows = found.pop("slots"), found.pop("rows")
    if rows.shape != (len(index), channels) or not rows.is_floating_point() or index.dtype != torch.int64:
        raise _error(path, f"layer {layer} has rows of shape {list(rows.shape)} for {len(index)} slots")
    if len(index) and (index[0] < 0 or index[-1] >= slots or bool((index.diff() <= 0).any())):
        raise _error(path, f"layer {layer} names slots outside 0 ... {slots - 1} or out of order")
    return index, rows


def check_tensors(path: str | PathLike[str], layer: int, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if set(found) != set(expected):
        raise _error(path, f"layer {layer} needs {sorted(expected)}, got {sorted(found)}")
    for name, x in found.items():
        like = expected[name]
        if x.dim() != like.dim() or len(x) != 1:
            raise _error(path, f"layer {layer} has {name} of shape {list(x.shape)}, expected {list(like.shape)}")


def _parse(path: str | PathLike[str], metadata: dict[str, str]) -> dict[str, Any]:
    try:
        header = json.loads(metadata["header"])
        version, model, digest = header["version"], header["model"], header["sha256"]
        numbers = [header["length"], *header["pending"]]
        complete = isinstance(digest, str) and set(model) == {"architecture", "weights"}
        complete = complete and all(isinstance(number, int) and number >= 0 for number in numbers)
    except (KeyError, TypeError, ValueError) as error:
        raise _error(path, "its header is damaged") from error
    if not complete:
        raise _error(path, "its header is damaged")
    if version != VERSION:
        raise _error(path, f"it has format version {version}, this version of sdm reads {VERSION}")
    return header


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].contiguous()
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _error(path: str | PathLike[str], reason: str) -> ValueError:
    return ValueError(f"cannot load the state file {os.fspath(path)!r}: {reason}")
