"""The compiled CPU core.

`core` is the extension module, or None where it was not built or is of other sources, which the import says once;
`require_core()` raises there. Its functions take the fields of a struct by name, tensors as raw pointers, so that the
core knows nothing of torch and one build serves every torch version.
"""

import importlib
import warnings
from types import ModuleType
from typing import Any

import torch  # first, so that the OpenMP runtime it brings is the one that the core binds to
from torch import Tensor

INTERFACE = 6  # kInterface of module.cpp

core: ModuleType | None
missing_because = ""
try:
    core = importlib.import_module("sdm.native._core")
    if getattr(core, "INTERFACE", 1) != INTERFACE:
        raise ImportError("it was built from older or newer sources than the Python code beside it")
except ImportError as error:
    core = None
    missing_because = (
        f"sparse-delta-memory runs without its compiled core ({error}), many times slower on CPUs. With a C++17 "
        "compiler and Python's headers, install it again: pip install --force-reinstall --no-deps --no-cache-dir and "
        "the package's name or folder"
    )
    warnings.warn(missing_because, RuntimeWarning, stacklevel=2)


def require_core() -> ModuleType:
    """The extension module; RuntimeError with the remedy where it is missing."""
    if core is None:
        raise RuntimeError(missing_because)
    return core


def call_core(function: str, dtype: torch.dtype, **fields: Tensor | float | None) -> Any:
    """Call a function of the core on numbers of this dtype.

    Tensors must be contiguous and go by their addresses; one without elements is null, like None.
    """
    assert all(x.is_contiguous() for x in fields.values() if isinstance(x, Tensor))
    values = {name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in fields.items()}
    return getattr(require_core(), function)(dtype == torch.float64, threads=torch.get_num_threads(), **values)
