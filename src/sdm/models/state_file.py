"""The file format of `sdm.MemoryState`: safetensors, with what it takes to recognise a file in the metadata.

    format   "sdm-memory-state"
    header   JSON: version, length, pending, model (architecture, weights, buffers)
    sha256   of the header and of every tensor's name, dtype, shape and bytes

In version 1 the checksum was within the header, and of the tensors alone.
"""

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
from sdm.models.fingerprint import Fingerprint, comparable

FORMAT = "sdm-memory-state"
VERSION = 2


def write(
    path: str | PathLike[str],
    tensors: dict[str, Tensor],
    model_id: Fingerprint,
    length: int,
    pending: tuple[int, ...],
) -> None:
    path = Path(path)
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    header = json.dumps({"version": VERSION, "length": length, "pending": list(pending), "model": asdict(model_id)})
    metadata = {"format": FORMAT, "header": header, "sha256": _digest(header, tensors)}
    with new_file(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


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
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    except (SafetensorError, OSError) as error:
        raise _error(path, f"it is damaged, incomplete or of another format ({error})") from error
    covered = "" if header["version"] == 1 else metadata["header"]
    if _digest(covered, tensors) != header["sha256"]:
        raise _error(path, "it is damaged: the contents do not match their checksum")
    model = header["model"]
    stored = Fingerprint(
        comparable(model["architecture"], model_id.architecture), model["weights"], model.get("buffers")
    )
    stored.check(model_id, f"the state file {os.fspath(path)!r}")
    return tensors, header["length"], header["pending"]


def split_layers(path: str | PathLike[str], tensors: dict[str, Tensor], layers: int) -> list[dict[str, Tensor]]:
    """The tensors of each layer, by their names within it."""
    found: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    places = {str(place): part for place, part in enumerate(found)}
    for name, x in tensors.items():
        prefix, _, rest = name.partition(".")
        place, _, own = rest.partition(".")
        if prefix != "layers" or place not in places:
            raise _error(path, f"it has {name}, which is of none of the model's {layers} layers")
        places[place][own] = x
    return found


def take_slots(
    path: str | PathLike[str], layer: int, found: dict[str, Tensor], slots: int, channels: int
) -> tuple[Tensor, Tensor]:
    """Takes the changed rows of a table out of the tensors of a layer: slots [n] and rows [n,D]."""
    if not {"slots", "rows"} <= set(found):
        raise _error(path, f"layer {layer} needs slots and rows, got {sorted(found)}")
    index, rows = found.pop("slots"), found.pop("rows")
    if (
        index.dim() != 1
        or rows.shape != (len(index), channels)
        or not rows.is_floating_point()
        or index.dtype != torch.int64
    ):
        raise _error(path, f"layer {layer} has rows of shape {list(rows.shape)} for slots of shape {list(index.shape)}")
    if len(index) and (index[0] < 0 or index[-1] >= slots or bool((index.diff() <= 0).any())):
        raise _error(path, f"layer {layer} names slots outside 0 ... {slots - 1} or out of order")
    return index, rows


def check_tensors(
    path: str | PathLike[str], layer: int, found: dict[str, Tensor], expected: dict[str, Tensor], tokens: int
) -> None:
    """Compare a layer's tensors with those of a fresh state of the model."""
    if set(found) != set(expected):
        raise _error(path, f"layer {layer} needs {sorted(expected)}, got {sorted(found)}")
    for name, x in found.items():
        like, shape = expected[name], list(expected[name].shape)
        shape[0] = 1  # the example has no streams
        if name in ("key", "value") and shape[2] == 0:
            shape[2] = int(found["length"].sum())  # attention to everything keeps all tokens
        if list(x.shape) != shape:
            raise _error(path, f"layer {layer} has {name} of shape {list(x.shape)}, expected {shape}")
        if x.dtype != like.dtype and not (x.is_floating_point() and like.is_floating_point()):
            raise _error(path, f"layer {layer} has {name} of {x.dtype}, expected {like.dtype}")
        if name == "length" and not 0 <= x.item() <= tokens:
            raise _error(path, f"layer {layer} has seen {x.item()} tokens of {tokens}")


def _parse(path: str | PathLike[str], metadata: dict[str, str]) -> dict[str, Any]:
    """The header, with the checksum, if it has everything that a header has."""
    try:
        header = json.loads(metadata["header"])
        version = header["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _error(path, "its header is damaged") from error
    if version not in (1, VERSION):
        raise _error(path, f"it has format version {version!r}, this version of sdm reads 1 to {VERSION}")
    if version != 1:
        header["sha256"] = metadata.get("sha256")
    model, pending = header.get("model"), header.get("pending")
    texts = {"weights"} if version == 1 else {"weights", "buffers"}
    whole = (
        isinstance(model, dict)
        and set(model) == {"architecture"} | texts
        and isinstance(model["architecture"], dict)
        and all(isinstance(text, str) for text in (header.get("sha256"), *(model[name] for name in texts)))
        and isinstance(pending, list)
        and all(type(number) is int and number >= 0 for number in (header.get("length"), *pending))
    )
    if not whole:
        raise _error(path, "its header is damaged")
    return header


def _digest(header: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        x = tensors[name].contiguous()
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _error(path: str | PathLike[str], reason: str) -> ValueError:
    return ValueError(f"cannot load the state file {os.fspath(path)!r}: {reason}")
