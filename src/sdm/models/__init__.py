"""Hybrid language models for transformers. Importing this module registers them with transformers and PEFT."""

from sdm.models.cache import SDMCache
from sdm.models.configuration import SDMConfig
from sdm.models.cost import Cost, cost, ladder
from sdm.models.graft import graft, ungraft
from sdm.models.grafted_model import load_grafted, register_grafted
from sdm.models.modeling import SDMForCausalLM, SDMForSequenceClassification, SDMForTokenClassification, SDMModel
from sdm.models.registration import register
from sdm.models.saved_folder import example_model
from sdm.models.state import MemoryState

register()
register_grafted()

__all__ = [
    "Cost",
    "MemoryState",
    "SDMCache",
    "SDMConfig",
    "SDMForCausalLM",
    "SDMForSequenceClassification",
    "SDMForTokenClassification",
    "SDMModel",
    "cost",
    "example_model",
    "graft",
    "ladder",
    "load_grafted",
    "ungraft",
]
