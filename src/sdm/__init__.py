"""Recurrent language-model layers whose state is a huge sparse memory.

A name is imported when it is first used: `sdm.ops` and the layers need torch alone, the models transformers too, and
`sdm --help` neither. Using a model's name, or `import sdm.models`, also registers it with transformers' Auto classes.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdm import analysis, ops
    from sdm.layers import SparseDeltaMemory, optimize_for_decoding
    from sdm.models import (
        MemoryState,
        SDMCache,
        SDMConfig,
        SDMForCausalLM,
        SDMModel,
        cost,
        example_model,
        graft,
        ladder,
        load_grafted,
        ungraft,
    )
    from sdm.session import Session

__version__ = "0.1.0"  # the only place: pyproject.toml reads it here

_MODELS = (
    *("MemoryState", "SDMCache", "SDMConfig", "SDMForCausalLM", "SDMModel"),
    *("cost", "example_model", "graft", "ladder", "load_grafted", "ungraft"),
)

__all__ = [
    "MemoryState",
    "SDMCache",
    "SDMConfig",
    "SDMForCausalLM",
    "SDMModel",
    "Session",
    "SparseDeltaMemory",
    "__version__",
    "analysis",
    "cost",
    "example_model",
    "graft",
    "ladder",
    "load_grafted",
    "ops",
    "optimize_for_decoding",
    "ungraft",
]


def __getattr__(name: str) -> Any:
    if name in _MODELS:
        return getattr(importlib.import_module("sdm.models"), name)
    if name == "Session":
        return getattr(importlib.import_module("sdm.session"), name)
    if name in ("SparseDeltaMemory", "optimize_for_decoding"):
        return getattr(importlib.import_module("sdm.layers"), name)
    if name in ("analysis", "layers", "ops"):
        return importlib.import_module(f"sdm.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _warn_without_core() -> None:
    """Say now, not at a first call, that the compiled core is missing. Looking for it does not import torch."""
    present = any(finder.find_spec("sdm.native._core", [f"{__path__[0]}/native"]) for finder in sys.meta_path)
    # Without torch there is nothing to run on the core; what needs torch says so when it is used.
    if not present and importlib.util.find_spec("torch") is not None:
        importlib.import_module("sdm.native")


_warn_without_core()
