"""Configurations as JSON: the resolved one is kept in every run's folder; unknown fields are refused."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, TypeVar, cast

from sdm.errors import TrainingError, UserError
from sdm.files import DamagedFile, Json, read_json, write_json
from sdm.models.model_config import ModelConfig
from sdm.run.config import TrainConfig

_T = TypeVar("_T")
KIND = "kind"  # which of several classes a section is


def to_json(config: object) -> Json:
    """Return a configuration as JSON values. A dataclass names its class, because some fields take one of several."""
    if dataclasses.is_dataclass(config):
        values = {field.name: to_json(getattr(config, field.name)) for field in dataclasses.fields(config)}
        return {KIND: type(config).__name__} | values
    if isinstance(config, (list, tuple)):
        return [to_json(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def from_json(kind: type[_T], values: Json, name: str = "config") -> _T:
    """Return the configuration of a class from JSON values; the inverse of `to_json`.

    Raises:
        TrainingError: a field is unknown or has a wrong type; `name` starts its path in the message.
    """
    if not isinstance(values, dict):
        raise TrainingError(f"{name} must be an object, got {values!r}")
    if kind is ModelConfig:
        kind = ModelConfig.dataclass()  # type: ignore[assignment]
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values.keys() - known - {KIND}:
        raise TrainingError(f"{name} has no field {key!r}; it takes {', '.join(sorted(known))}")
    given = {key: _value(hints[key], values[key], f"{name}.{key}") for key in values.keys() & known}
    return kind(**given)


def write_config(path: Path, config: TrainConfig) -> None:
    """Write a run's configuration."""
    write_json(path, to_json(config))


def read_config(path: Path) -> TrainConfig:
    """Read a run's configuration.

    Raises:
        TrainingError: there is none, or it is damaged or invalid.
    """
    try:
        return from_json(TrainConfig, read_json(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TrainingError(f"{path.parent} is not a run's folder: it has no {path.name}") from error
    except DamagedFile as error:
        raise TrainingError(str(error)) from error
    except UserError as error:
        raise TrainingError(f"{path}: {error}") from error


def differences(old: object, new: object, name: str = "") -> list[tuple[str, Any, Any]]:
    """Return the fields (a.b.c, old value, new value) in which two configurations as JSON differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        fields = []
        for key in dict.fromkeys((*old, *new)):
            fields += differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
        return fields
    return [] if old == new else [(name, old, new)]


def _value(hint: object, value: Json, name: str) -> Any:
    """A value of the type that a field has, or an error that names the field."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    classes: list[Any] = [option for option in options if dataclasses.is_dataclass(option) or option is ModelConfig]
    if value is None and type(None) in options:
        return None
    if classes:
        kind = value.get(KIND) if isinstance(value, dict) else None
        chosen = [option for option in classes if kind == option.__name__]
        if kind is not None and not chosen:
            raise TrainingError(f"{name}.{KIND} must be one of {', '.join(c.__name__ for c in classes)}, got {kind!r}")
        return from_json((chosen or classes)[0], value, name)
    for option in options:
        if _fits(option, value):
            return _converted(option, value)
    shown = repr(value)
    raise TrainingError(f"{name} must be {_describe(hint)}, got {shown if len(shown) < 80 else type(value).__name__}")


def _fits(hint: object, value: Json) -> bool:
    origin, entries = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return isinstance(value, str) and value in entries
    if origin is tuple:
        kinds = entries[:1] * len(value) if isinstance(value, list) and entries[-1] is ... else entries
        return (
            isinstance(value, list)
            and len(value) == len(kinds)
            and all(_fits(kind, entry) for kind, entry in zip(kinds, value, strict=True))
        )
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str if hint is Path else cast(type, origin or hint))


def _converted(hint: object, value: Json) -> Any:
    if isinstance(value, list):
        return tuple(_converted(Any, entry) for entry in value)
    return Path(value) if hint is Path else value


def _describe(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
