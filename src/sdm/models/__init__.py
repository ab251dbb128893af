"""Hybrid language models for transformers. Importing this module registers them with its Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, configuration_utils

from sdm.models.cache import SDMCache
from sdm.models.configuration import LAYER_TYPES, SDMConfig
from sdm.models.cost import Cost, cost
from sdm.models.ladder import ladder
from sdm.models.modeling import SDMForCausalLM, SDMModel
from sdm.models.state import MemoryState

# `Trainer` reads the config of a checkpoint as one of transformers' base class, which has a list of its own.
configuration_utils.ALLOWED_ATTN_LAYER_TYPES += LAYER_TYPES  # type: ignore[assignment]
AutoConfig.register(SDMConfig.model_type, SDMConfig)
AutoModel.register(SDMConfig, SDMModel)
AutoModelForCausalLM.register(SDMConfig, SDMForCausalLM)

__all__ = ["Cost", "MemoryState", "SDMCache", "SDMConfig", "SDMForCausalLM", "SDMModel", "cost", "ladder"]
