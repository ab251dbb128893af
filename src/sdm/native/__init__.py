"""The compiled CPU core.

`core` is the extension module, or None where it was not built, which the import says once; `require_core()` raises
there. Kernels take raw pointers and sizes, so the core knows nothing of torch and one build serves every torch version.
"""

import importlib
import warnings
from types import ModuleType

import torch  # noqa: F401  first, so that the OpenMP runtime it brings is the one that the core binds to

core: ModuleType | None
missing_because = ""
try:
    core = importlib.import_module("sdm.native._core")
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
