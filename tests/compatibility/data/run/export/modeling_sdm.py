"""The code of this model is the package sparse-delta-memory; this file lets transformers find it.

With `import sdm.models` before loading, transformers does not need this file. Without it, pass trust_remote_code=True.
"""

try:
    from sdm.models import (
        SDMConfig,
        SDMForCausalLM,
        SDMForSequenceClassification,
        SDMForTokenClassification,
        SDMModel,
    )
except ModuleNotFoundError as error:
    if error.name != "sdm":
        raise
    raise ImportError(
        "this model needs the package sparse-delta-memory, which is imported as sdm: install it, then `import "
        "sdm.models` before loading the model, or pass trust_remote_code=True"
    ) from error

__all__ = [
    "SDMConfig",
    "SDMForCausalLM",
    "SDMForSequenceClassification",
    "SDMForTokenClassification",
    "SDMModel",
]
