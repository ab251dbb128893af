"""Hybrid language models for transformers. Importing this module registers them with its Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from sdm.models.cache import SDMCache
from sdm.models.configuration import SDMConfig
from sdm.models.modeling import SDMForCausalLM, SDMModel

AutoConfig.register(SDMConfig.model_type, SDMConfig)
AutoModel.register(SDMConfig, SDMModel)
AutoModelForCausalLM.register(SDMConfig, SDMForCausalLM)

__all__ = ["SDMCache", "SDMConfig", "SDMForCausalLM", "SDMModel"]
