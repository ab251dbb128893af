"""The error of this package."""

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
