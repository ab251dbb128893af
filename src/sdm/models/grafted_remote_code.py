"""The code of this grafted model is the package sparse-delta-memory; this file lets transformers find it.

With `import sdm.models` before loading, transformers does not need this file. Without it, pass trust_remote_code=True.
"""

try:
    from sdm.models.grafted_model import GraftedConfig, GraftedForCausalLM
except ModuleNotFoundError as error:
    if error.name != "sdm":
        raise
    raise ImportError(
        "this grafted model needs the package sparse-delta-memory, which is imported as sdm: install it and load the "
        "folder with sdm.load_grafted(folder). Without it, its memories would be lost"
    ) from error

__all__ = ["GraftedConfig", "GraftedForCausalLM"]
