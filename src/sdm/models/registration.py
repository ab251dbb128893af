"""What transformers must know before it treats these models as its own."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForPreTraining, cache_utils
from transformers import configuration_utils as configurations
from transformers.models.auto import modeling_auto

from sdm.models.configuration import SDMConfig
from sdm.models.layer_types import layer_names
from sdm.models.modeling import SDMForCausalLM, SDMModel

# `Trainer` shifts smoothed labels, lm-eval and pipelines recognise a language model, by the names in these lists.
# The Auto classes below keep the classes themselves.
_NAMES = {
    "MODEL_MAPPING_NAMES": SDMModel,
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": SDMForCausalLM,
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES": SDMForCausalLM,
}


def register() -> None:
    AutoConfig.register(SDMConfig.model_type, SDMConfig)
    AutoModel.register(SDMConfig, SDMModel)
    AutoModelForCausalLM.register(SDMConfig, SDMForCausalLM)
    AutoModelForPreTraining.register(SDMConfig, SDMForCausalLM)
    for name, model in _NAMES.items():
        getattr(modeling_auto, name, {})[SDMConfig.model_type] = model.__name__
    # Files of earlier versions say `layer_types`; `Trainer` reads them as a config of transformers' base class.
    configurations.ALLOWED_ATTN_LAYER_TYPES += layer_names()  # type: ignore[assignment]
    for name in ("DYNAMIC_LAYER_TYPE_MAPPING", "STATIC_LAYER_TYPE_MAPPING"):
        caches: dict[str, Any] = getattr(cache_utils, name, {})
        for kind in layer_names():
            caches.setdefault(kind, _no_layer_of_transformers)


def _no_layer_of_transformers(**options: Any) -> NoReturn:
    raise TypeError(
        "transformers' caches have no place for the states of this model; use sdm.SDMCache(config), or leave "
        "past_key_values out and take the one that the model returns"
    )
