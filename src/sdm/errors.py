"""Errors that a user can fix, and the checks of settings that raise them."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterable
from types import ModuleType

LARGEST = 2**64 - 1  # larger integers do not fit into the types that compute with them


class UserError(ValueError):
    """An error whose message says what is wrong, what was expected and what to do. Commands print it alone."""


class DataError(UserError):
    """Something is wrong with a source, a tokenizer, a cache of tokens or a setting; the message says what to do."""


class TrainingError(UserError):
    """Something about a run cannot work; the message says what, and what to do."""


class RankError(UserError):
    """Another process of the job has failed; the message names its rank."""


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or raise a `DataError` that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise DataError(f"{purpose} needs {module}: pip install 'sparse-delta-memory[{extra}]'") from error


def nearest(name: str, choices: Iterable[str], count: int = 3, cutoff: float = 0.5) -> list[str]:
    """Return the choices that resemble a misspelt name.

    Args:
        name: the name as it was written.
        choices: the names that exist.
        count: how many to return at most, the most similar first.
        cutoff: the similarity that is asked for, from 0 (anything) to 1 (equal).
    """
    return difflib.get_close_matches(name, list(choices), count, cutoff)


def did_you_mean(name: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """Return the hint of an error message: "did you mean X or Y?", or the list of all choices."""
    choices = list(choices)
    # One letter off needs no other suggestions.
    similar = nearest(name, choices, cutoff=0.85) or nearest(name, choices, cutoff=cutoff)
    return f"did you mean {' or '.join(similar)}?" if similar else f"there are {', '.join(choices)}"


def check_size(section: str = "", /, **values: int) -> None:
    """Raise a `UserError` unless every value is an integer of at least 1.

    Args:
        section: the part of the configuration that the settings belong to, such as "optim"; it starts their names.
        values: the settings by name.
    """
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{_full_name(section, name)} must be a positive integer, got {value!r}")
        _check_largest(_full_name(section, name), value)


def check_positive(section: str = "", /, **values: float) -> None:
    """Raise a `UserError` unless every value is above 0 and finite; `section` as in `check_size`."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise UserError(f"{_full_name(section, name)} must be positive and finite, got {value}")
        _check_largest(_full_name(section, name), value)


def check_not_negative(section: str = "", /, **values: float) -> None:
    """Raise a `UserError` unless every value is at least 0 and finite; `section` as in `check_size`."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise UserError(f"{_full_name(section, name)} must not be negative, got {value}")
        _check_largest(_full_name(section, name), value)


def check_one_of(choices: Iterable[str], /, **values: str) -> None:
    """Raise a `UserError` unless every value is one of the choices."""
    choices = tuple(choices)
    for name, value in values.items():
        if value not in choices:
            raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _full_name(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _check_largest(name: str, value: float) -> None:
    # Floating-point settings have no limit: nothing counts up to them.
    if isinstance(value, int) and value > LARGEST:
        raise UserError(f"{name} must be below 2^64, got a number of {value.bit_length()} bits")
