"""The compiled CPU core.

`core` is the extension module, or None where it was not built; `require_core()` says what to do about that. Kernels
take raw pointers and sizes, so the core knows nothing of torch and one build serves every torch version.
"""

import importlib
from types import ModuleType

import torch  # noqa: F401  first, so that the OpenMP runtime it brings is the one that the core binds to

core: ModuleType | None
missing_because = ""
try:
    core = importlib.import_module("sdm.native._core")
except ImportError as error:
    core = None
    missing_because = (
        f"the compiled core of sparse-delta-memory cannot be loaded ({error}); install from a wheel, or with a C++17 "
        "compiler present: pip install --force-reinstall sparse-delta-memory"
    )


def require_core() -> ModuleType:
    """The extension module; RuntimeError with the remedy where it is missing."""
    if core is None:
        raise RuntimeError(missing_because)
    return core
