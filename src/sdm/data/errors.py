"""The one error of this package, and the checks that raise it."""

from __future__ import annotations

import importlib
from types import ModuleType


class DataError(ValueError):
    """Something is wrong with a source, a tokenizer, a cache of tokens or a setting; the message says what to do."""


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise DataError(f"{purpose} needs {module}: pip install 'sparse-delta-memory[{extra}]'") from error


def check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise DataError(f"{name} must be at least 1, got {value}")


def check_not_negative(**values: int) -> None:
    for name, value in values.items():
        if value < 0:
            raise DataError(f"{name} must not be negative, got {value}")


def check_one_of(choices: tuple[str, ...], **values: str) -> None:
    for name, value in values.items():
        if value not in choices:
            raise DataError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
