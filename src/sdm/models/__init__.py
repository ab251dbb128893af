"""Hybrid language models for transformers. Importing this module registers them with its Auto classes."""

from sdm.models.cache import SDMCache
from sdm.models.configuration import SDMConfig
from sdm.models.cost import Cost, cost
from sdm.models.ladder import ladder
from sdm.models.modeling import SDMForCausalLM, SDMModel, SDMPreTrainedModel
from sdm.models.registration import register
from sdm.models.state import MemoryState
from sdm.models.weight_decay import teach_trainer

register()
teach_trainer(SDMPreTrainedModel)

__all__ = ["Cost", "MemoryState", "SDMCache", "SDMConfig", "SDMForCausalLM", "SDMModel", "cost", "ladder"]
