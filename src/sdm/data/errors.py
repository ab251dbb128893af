"""The one error of this package, and the checks that raise it."""

from __future__ import annotations

import importlib
from types import ModuleType

from sdm.errors import UserError


class DataError(UserError):
    """Something is wrong with a source, a tokenizer, a cache of tokens or a setting; the message says what to do."""


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise DataError(f"{purpose} needs {module}: pip install 'sparse-delta-memory[{extra}]'") from error


LARGEST = 2**64 - 1  # beyond it numbers no longer fit into the types that compute with them


def check_positive(**values: int) -> None:
    _check_range(1, "must be at least 1", values)


def check_not_negative(**values: int) -> None:
    _check_range(0, "must not be negative", values)


def _check_range(smallest: int, rule: str, values: dict[str, int]) -> None:
    for name, value in values.items():
        if value < smallest:
            raise DataError(f"{name} {rule}, got {value}")
        if value > LARGEST:
            raise DataError(f"{name} must be below 2^64, got a number of {value.bit_length()} bits")


def check_one_of(choices: tuple[str, ...], **values: str) -> None:
    for name, value in values.items():
        if value not in choices:
            raise DataError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
