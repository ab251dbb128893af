"""Recurrent language-model layers whose state is a huge sparse memory.

The models need transformers, which is imported when one of their names is first used: `sdm.ops` and the layers need
torch alone. Using such a name, or `import sdm.models`, also registers the model with transformers' Auto classes.
"""

from typing import TYPE_CHECKING, Any

from sdm import ops
from sdm.layers import SparseDeltaMemory

if TYPE_CHECKING:
    from sdm.models import MemoryState, SDMCache, SDMConfig, SDMForCausalLM, SDMModel, cost, ladder

__version__ = "0.1.0"

_MODELS = ("MemoryState", "SDMCache", "SDMConfig", "SDMForCausalLM", "SDMModel", "cost", "ladder")

__all__ = [
    "MemoryState",
    "SDMCache",
    "SDMConfig",
    "SDMForCausalLM",
    "SDMModel",
    "SparseDeltaMemory",
    "__version__",
    "cost",
    "ladder",
    "ops",
]


def __getattr__(name: str) -> Any:
    if name in _MODELS:
        from sdm import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
