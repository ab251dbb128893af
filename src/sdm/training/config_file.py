"""A configuration as JSON: the resolved one is kept beside every run, and an unknown field fails."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from sdm.files import write_json
from sdm.training.config import TrainConfig
from sdm.training.errors import TrainingError

_T = TypeVar("_T")
KIND = "kind"  # which of several classes a section is


def to_json(config: Any) -> Any:
    """Plain JSON values. A dataclass says its class, because some fields take one of several."""
    if dataclasses.is_dataclass(config):
        values = {field.name: to_json(getattr(config, field.name)) for field in dataclasses.fields(config)}
        return {KIND: type(config).__name__} | values
    if isinstance(config, (list, tuple)):
        return [to_json(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def from_json(kind: type[_T], values: Any, name: str = "config") -> _T:
    """The inverse of `to_json`."""
    if not isinstance(values, dict):
        raise TrainingError(f"{name} must be an object, got {values!r}")
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values.keys() - known - {KIND}:
        raise TrainingError(f"{name} has no field {key!r}; it takes {', '.join(sorted(known))}")
    given = {key: _value(hints[key], values[key], f"{name}.{key}") for key in values.keys() & known}
    return kind(**given)


def write_config(path: Path, config: TrainConfig) -> None:
    write_json(path, to_json(config))


def read_config(path: Path) -> TrainConfig:
    try:
        return from_json(TrainConfig, json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TrainingError(f"{path.parent} is not a run's folder: it has no {path.name}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path} is damaged: {error}") from error


def differences(old: Any, new: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """The fields (a.b.c, old value, new value) in which two configurations as JSON differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in dict.fromkeys((*old, *new)):
            found += differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
        return found
    return [] if old == new else [(name, old, new)]


def _value(hint: Any, value: Any, name: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    classes: list[Any] = [option for option in options if dataclasses.is_dataclass(option)]
    if classes:
        kind = value.get(KIND) if isinstance(value, dict) else None
        chosen = [option for option in classes if kind in _names(option)]
        if kind is not None and not chosen:
            raise TrainingError(f"{name}.{KIND} must be one of {', '.join(c.__name__ for c in classes)}, got {kind!r}")
        return from_json((chosen or classes)[0], value, name)
    if isinstance(value, list):
        return tuple(_value(Any, entry, name) for entry in value)
    return Path(value) if Path in options and isinstance(value, str) else value


def _names(kind: Any) -> tuple[str, ...]:
    """What a class is called in files: by its name, or by the one that it had when the file was written."""
    return (kind.__name__, *([kind.former_name] if hasattr(kind, "former_name") else []))
