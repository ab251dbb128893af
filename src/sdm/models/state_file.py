"""The file format of `sdm.MemoryState`: safetensors, with what it takes to recognise a file in the metadata.

    format   "sdm-memory-state"
    header   JSON: version, length, pending, history (tokens of each entry), model (architecture, weights, buffers)
    sha256   of the header and of every tensor's name, dtype, shape and bytes

Tensors are called "layers.PLACE.NAME"; those of undo records "history.ENTRY.layers.PLACE.NAME".
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
VERSION = 1


def write(
    path: str | PathLike[str],
    tensors: dict[str, Tensor],
    model_id: Fingerprint,
    length: int,
    pending: tuple[int, ...],
    history: list[int] | None = None,
) -> None:
    """Write a file.

    Args:
        path: where; the file is complete or not there.
        tensors: by their names in the file.
        model_id: the model that may read it.
        length: tokens of the stream.
        pending: tokens to come.
        history: how many tokens each entry of undo records takes back.
    """
    path = Path(path)
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    facts = {"version": VERSION, "length": length, "pending": list(pending), "history": history or []}
    header = json.dumps(facts | {"model": asdict(model_id)})
    metadata = {"format": FORMAT, "header": header, "sha256": _digest(header, tensors)}
    with new_file(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def read(path: str | PathLike[str], model_id: Fingerprint) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header, after every check that the file itself allows."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no state file {os.fspath(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise error(path, "it is a safetensors file, but not a saved MemoryState")
            header = _parse(path, metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    except (SafetensorError, OSError) as cause:
        raise error(path, f"it is damaged, incomplete or of another format ({cause})") from cause
    if _digest(metadata["header"], tensors) != metadata.get("sha256"):
        raise error(path, "it is damaged: the contents do not match their checksum")
    model = header["model"]
    stored = Fingerprint(comparable(model["architecture"], model_id.architecture), model["weights"], model["buffers"])
    stored.check(model_id, f"the state file {os.fspath(path)!r}")
    return tensors, header


def split_history(
    path: str | PathLike[str], tensors: dict[str, Tensor], entries: int, layers: int
) -> list[list[dict[str, Tensor]]]:
    """Take the tensors of undo records out of all tensors: those of each layer for each entry."""
    records: list[dict[str, Tensor]] = [{} for _ in range(entries)]
    places = {str(place): record for place, record in enumerate(records)}
    for name in [name for name in tensors if name.startswith("history.")]:
        _, entry, rest = name.split(".", 2)
        if entry not in places:
            raise error(path, f"it has {name}, but a history of {entries} entries")
        places[entry][rest] = tensors.pop(name)
    return [split_layers(path, record, layers) for record in records]


def split_layers(path: str | PathLike[str], tensors: dict[str, Tensor], layers: int) -> list[dict[str, Tensor]]:
    """The tensors of each layer, by their names within it."""
    stored: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    places = {str(place): part for place, part in enumerate(stored)}
    for name, x in tensors.items():
        prefix, _, rest = name.partition(".")
        place, _, own = rest.partition(".")
        if prefix != "layers" or place not in places:
            raise error(path, f"it has {name}, which is of none of the model's {layers} layers")
        places[place][own] = x
    return stored


def take_slots(
    path: str | PathLike[str], layer: int, stored: dict[str, Tensor], slots: int, channels: int
) -> tuple[Tensor, Tensor]:
    """Takes the changed rows of a table out of the tensors of a layer: slots [n] and rows [n,D]."""
    if not {"slots", "rows"} <= set(stored):
        raise error(path, f"layer {layer} needs slots and rows, got {sorted(stored)}")
    index, rows = stored.pop("slots"), stored.pop("rows")
    if (
        index.dim() != 1
        or rows.shape != (len(index), channels)
        or not rows.is_floating_point()
        or index.dtype != torch.int64
    ):
        raise error(path, f"layer {layer} has rows of shape {list(rows.shape)} for slots of shape {list(index.shape)}")
    if len(index) and (index[0] < 0 or index[-1] >= slots or bool((index.diff() <= 0).any())):
        raise error(path, f"layer {layer} names slots outside 0 ... {slots - 1} or out of order")
    return index, rows


def check_tensors(
    path: str | PathLike[str], layer: int, stored: dict[str, Tensor], expected: dict[str, Tensor], tokens: int
) -> None:
    """Compare a layer's tensors with those of a fresh state of the model."""
    if set(stored) != set(expected):
        raise error(path, f"layer {layer} needs {sorted(expected)}, got {sorted(stored)}")
    for name, x in stored.items():
        like, shape = expected[name], list(expected[name].shape)
        shape[0] = 1  # the example has no streams
        if name in ("key", "value") and shape[2] == 0:
            shape[2] = int(stored["length"].sum())  # attention to everything keeps all tokens
        if list(x.shape) != shape:
            raise error(path, f"layer {layer} has {name} of shape {list(x.shape)}, expected {shape}")
        if x.dtype != like.dtype and not (x.is_floating_point() and like.is_floating_point()):
            raise error(path, f"layer {layer} has {name} of {x.dtype}, expected {like.dtype}")
        if name == "length" and not 0 <= x.item() <= tokens:
            raise error(path, f"layer {layer} has seen {x.item()} tokens of {tokens}")


def _parse(path: str | PathLike[str], metadata: dict[str, str]) -> dict[str, Any]:
    """Return the header if it has everything that a header has."""
    try:
        header = json.loads(metadata["header"])
        version = header["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as cause:
        raise error(path, "its header is damaged") from cause
    if version != VERSION:
        raise error(path, f"it has format version {version!r}, this version of sdm reads {VERSION}")
    model, pending, history = header.get("model"), header.get("pending"), header.get("history")
    whole = (
        isinstance(model, dict)
        and set(model) == {"architecture", "weights", "buffers"}
        and isinstance(model["architecture"], dict)
        and isinstance(model["weights"], str)
        and isinstance(model["buffers"], str)
        and isinstance(pending, list)
        and isinstance(history, list)
        and all(type(number) is int and number >= 0 for number in (header.get("length"), *pending, *history))
    )
    if not whole:
        raise error(path, "its header is damaged")
    return header


def _digest(header: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        x = tensors[name].contiguous()
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def error(path: str | PathLike[str], reason: str) -> ValueError:
    """Return the error for a file that cannot be loaded."""
    return ValueError(f"cannot load the state file {os.fspath(path)!r}: {reason}")
