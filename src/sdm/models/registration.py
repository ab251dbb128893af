"""What importing `sdm.models` changes in transformers and PEFT, so that they treat these models as their own.

docs/models.md lists the changes for users.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    cache_utils,
)
from transformers import configuration_utils as configurations
from transformers.models.auto import modeling_auto
from transformers.utils import import_utils

from sdm.models.configuration import SDMConfig
from sdm.models.layer_types import layer_names
from sdm.models.modeling import (
    SDMForCausalLM,
    SDMForSequenceClassification,
    SDMForTokenClassification,
    SDMModel,
)

# `Trainer` shifts smoothed labels, lm-eval and pipelines recognise a language model, by the names in these lists.
# The Auto classes below keep the classes themselves.
_NAMES = {
    "MODEL_MAPPING_NAMES": SDMModel,
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": SDMForCausalLM,
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES": SDMForCausalLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": SDMForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": SDMForTokenClassification,
}
# Llama's names in the tables of PEFT, and ours for the same modules.
_PEFT_NAMES = {
    "q_proj": "query_proj",
    "k_proj": "key_proj",
    "v_proj": "value_proj",
    "o_proj": "out_proj",
    "input_layernorm": "mixer_norm",
    "post_attention_layernorm": "mlp_norm",
}


def register() -> None:
    """Make the models known to transformers, and to PEFT if it is imported already."""
    AutoConfig.register(SDMConfig.model_type, SDMConfig)
    AutoModel.register(SDMConfig, SDMModel)
    AutoModelForCausalLM.register(SDMConfig, SDMForCausalLM)
    AutoModelForPreTraining.register(SDMConfig, SDMForCausalLM)
    AutoModelForSequenceClassification.register(SDMConfig, SDMForSequenceClassification)
    AutoModelForTokenClassification.register(SDMConfig, SDMForTokenClassification)
    for name, model in _NAMES.items():
        getattr(modeling_auto, name, {})[SDMConfig.model_type] = model.__name__
    _add_attributes(SDMConfig, *_NAMES.values())
    # Files of earlier versions say `layer_types`; `Trainer` reads them as a config of transformers' base class.
    configurations.ALLOWED_ATTN_LAYER_TYPES += layer_names()  # type: ignore[assignment]
    for name in ("DYNAMIC_LAYER_TYPE_MAPPING", "STATIC_LAYER_TYPE_MAPPING"):
        caches: dict[str, Any] = getattr(cache_utils, name, {})
        for kind in layer_names():
            caches.setdefault(kind, _no_layer_of_transformers)
    _exempt_from_decay_in_trainer()
    register_with_peft()


def register_with_peft() -> None:
    """Add the model type to PEFT's tables of default target modules: what Llama has there, by our names.

    Nothing happens while PEFT is not imported. `SDMConfig.to_dict`, which PEFT calls before it reads the tables, calls
    this function again, so that it does not matter which package is imported first.
    """
    constants = sys.modules.get("peft.utils.constants")
    if constants is None:
        return
    for name, table in vars(constants).items():
        if not name.endswith("_MODULES_MAPPING") or not isinstance(table, dict):
            continue
        modules = table.get("llama")
        if isinstance(modules, list):
            table.setdefault(SDMConfig.model_type, [_PEFT_NAMES.get(module, module) for module in modules])


def _add_attributes(*classes: type) -> None:
    """Let `getattr(transformers, "SDMForCausalLM")` find these classes, which `transformers serve` and TRL do.

    transformers executes its own `__init__` a second time, so that there are two lazy modules of its name; an attribute
    of their class is seen by both. The class is private: where it is missing, there is nothing to do.
    """
    lazy_module = getattr(import_utils, "_LazyModule", None)
    for kind in classes if isinstance(lazy_module, type) else ():
        setattr(lazy_module, kind.__name__, kind)


def _exempt_from_decay_in_trainer() -> None:
    """Let `transformers.Trainer` ask `no_weight_decay`, of these models and of wrappers around them (PEFT).

    Its own rule knows norms and biases by name and asks no model.
    """
    rule = Trainer.get_decay_parameter_names

    @functools.wraps(rule)
    def get_decay_parameter_names(self: Trainer, model: nn.Module) -> list[str]:
        ours = [(path, module) for path, module in model.named_modules() if hasattr(module, "no_weight_decay")]
        exempt = {f"{path}.{name}".lstrip(".") for path, module in ours for name in module.no_weight_decay()}
        return [name for name in rule(self, model) if name not in exempt]

    Trainer.get_decay_parameter_names = get_decay_parameter_names  # type: ignore[method-assign]


def _no_layer_of_transformers(**options: object) -> NoReturn:
    raise TypeError(
        "transformers' caches have no place for the states of this model; use sdm.SDMCache(config), or leave "
        "past_key_values out and take the one that the model returns"
    )
