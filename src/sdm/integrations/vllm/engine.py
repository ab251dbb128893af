"""What vLLM is told when it starts: the model, its backend, and which of its options do not work with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm import ModelRegistry
from vllm.logger import init_logger
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

from sdm.integrations.vllm import ARCHITECTURE
from sdm.integrations.vllm.spec import register_spec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.plugins.sdm")  # vLLM shows its own loggers only


class SDMOptions(VerifyAndUpdateConfig):
    """Refuses the options that would give wrong tokens, and turns prefix caching off unless it is asked for."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
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
        cache = vllm_config.cache_config
        if cache.enable_prefix_caching and not prefix_caching(vllm_config.additional_config):
            logger.warning(
                "enable_prefix_caching is turned off: states of prefixes take room and are copied; "
                'additional_config = {"sdm_prefix_caching": true} turns it on'
            )
            cache.enable_prefix_caching = False
        if cache.enable_prefix_caching:
            cache.prefix_cache_retention_interval = None  # sliding windows keep what states of prefixes need


def prefix_caching(additional_config: object) -> bool:
    """Return whether the engine's `additional_config` asks for states of prefixes.

    Raises:
        ValueError: it is neither true nor false.
    """
    given = additional_config.get("sdm_prefix_caching", False) if isinstance(additional_config, dict) else False
    if not isinstance(given, bool):
        raise ValueError(f"sdm_prefix_caching in additional_config must be true or false, got {given!r}")
    return given


def register_with_engine() -> None:
    """Register the model, the backend, the spec and the check of the options; calling it again changes nothing."""
    if ARCHITECTURE in MODELS_CONFIG_MAP:
        return
    ModelRegistry.register_model(ARCHITECTURE, "sdm.integrations.vllm.model:VllmForCausalLM")
    if "SDM" not in MambaAttentionBackendEnum.__members__:
        register_backend("SDM", "sdm.integrations.vllm.backend.SDMBackend", is_mamba=True)
    register_spec()
    MODELS_CONFIG_MAP[ARCHITECTURE] = SDMOptions
