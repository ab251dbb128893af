"""What vLLM is told when it starts: the model, its backend, and which of its options do not work with it."""

from __future__ import annotations

from typing import Any

from vllm import ModelRegistry
from vllm.logger import init_logger
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

from sdm.integrations.vllm import ARCHITECTURE
from sdm.integrations.vllm.spec import register_spec

logger = init_logger("vllm.plugins.sdm")  # vLLM shows its own loggers only


class SDMOptions(VerifyAndUpdateConfig):
    """Refuses the options that would give wrong tokens, and turns prefix caching off."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Check the engine's options.

        Raises:
            ValueError: speculative decoding, or more than one rank.
        """
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "speculative_config is given, but the plugin cannot take drafted tokens back from a memory; "
                "leave it out"
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            size = getattr(vllm_config.parallel_config, name)
            if size > 1:
                raise ValueError(f"{name} must be 1 for models of sparse-delta-memory, got {size}")
        if vllm_config.cache_config.enable_prefix_caching:
            logger.warning("enable_prefix_caching is turned off: a memory is not stored for each prefix")
            vllm_config.cache_config.enable_prefix_caching = False


def register_with_engine() -> None:
    """Register the model, the backend, the spec and the check of the options; calling it again changes nothing."""
    if ARCHITECTURE in MODELS_CONFIG_MAP:
        return
    ModelRegistry.register_model(ARCHITECTURE, "sdm.integrations.vllm.model:VllmForCausalLM")
    if "SDM" not in MambaAttentionBackendEnum.__members__:
        register_backend("SDM", "sdm.integrations.vllm.backend.SDMBackend", is_mamba=True)
    register_spec()
    MODELS_CONFIG_MAP[ARCHITECTURE] = SDMOptions
