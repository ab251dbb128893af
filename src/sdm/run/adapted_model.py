"""A causal LM of transformers as the model of a run: pretrained in a folder or made anew; grafted, or trained without.

`sdm train graft --base FOLDER` is the recipe, `sdm reproduce graft` the study.
"""

from __future__ import annotations

import copy
from operator import methodcaller
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sdm.data.tokenization import Tokenizer, load_tokenizer
from sdm.errors import TrainingError, UserError
from sdm.files import explained
from sdm.models.attention_window import BANDED
from sdm.models.causal_lm import load_foreign_model
from sdm.models.graft import graft, ungraft
from sdm.models.saved_folder import CONFIG
from sdm.run.config import AdaptConfig
from sdm.run.folder import EXPORT

# Settings that are arguments of sdm.graft.
_GRAFT = (
    *("layers", "num_heads", "num_slots", "num_writes", "num_reads", "learned_initial_state"),
    *("key_convolution", "tie_query_initialization", "norm_eps"),
    *("attention_window", "attention_sinks", "freeze_base"),
)


def build_adapted(config: AdaptConfig, vocab_size: int, tokenizer: Tokenizer | None = None) -> PreTrainedModel:
    """Return the model as it is before the first step, on the CPU. Random weights are drawn from torch's generator.

    Args:
        config: what to train, and how.
        vocab_size: of the data; the model must have as many embeddings at least.
        tokenizer: of the data; where the base has one, it must be the same.

    Raises:
        TrainingError: there is no base, or it does not fit the data or the method.
    """
    model = _base(config, vocab_size, tokenizer)
    rows = len(model.get_input_embeddings().get_parameter("weight"))
    if rows < vocab_size:
        raise TrainingError(
            f"adapt.base: the model has {rows} embeddings, fewer than the {vocab_size} tokens of the data: the "
            "tokenizer does not match the model; set data.tokenizer to the base's folder"
        )
    fields = model.config.get_text_config(decoder=True)
    window = config.attention_window or getattr(fields, "sliding_window", None)
    if window and fields._attn_implementation == "sdpa" and not getattr(fields, "attention_chunk_size", None):
        model.set_attn_implementation(BANDED)
    if config.method == "graft":
        try:
            return graft(model, kind=config.memory, **{name: getattr(config, name) for name in _GRAFT})
        except UserError as error:
            raise TrainingError(f"adapt: {error}") from error
    return _with_lora(model, config.lora_rank) if config.method == "lora" else model


def teacher_of(config: AdaptConfig, model: PreTrainedModel) -> nn.Module | None:
    """Return a frozen copy of the base to distill from, if training changes it; None: `model` without its memories."""
    if not config.distill or config.freeze_base:
        return None
    return ungraft(copy.deepcopy(model)).eval().requires_grad_(False)


def base_folder(config: AdaptConfig) -> Path:
    """Return the folder of the base that transformers loads."""
    if config.base is None:
        raise TrainingError("adapt.base: name the folder of the pretrained model (--base FOLDER)")
    folder = config.base / EXPORT if (config.base / EXPORT / CONFIG).is_file() else config.base
    if not (folder / CONFIG).is_file():
        raise TrainingError(f"adapt.base: {config.base} is neither a model's folder (no {CONFIG}) nor a finished run")
    return folder


def _base(config: AdaptConfig, vocab_size: int, tokenizer: Tokenizer | None) -> PreTrainedModel:
    if config.scratch is not None:
        return _from_scratch(config.scratch, vocab_size, None if tokenizer is None else tokenizer.eos_id)
    folder = base_folder(config)
    theirs = load_tokenizer(folder) if tokenizer is not None and (folder / "tokenizer.json").is_file() else None
    if tokenizer is not None and theirs is not None and theirs.fingerprint != tokenizer.fingerprint:
        raise TrainingError(
            f"adapt.base: the tokenizer in {folder} is not that of this run's data; set data.tokenizer to {folder}"
        )
    try:
        return load_foreign_model(folder)
    except ValueError as error:
        raise TrainingError(f"adapt.base: {error}") from error


def _from_scratch(given: dict[str, bool | int | float | str], vocab_size: int, eos_id: int | None) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    ends: dict[str, Any] = {"bos_token_id": eos_id, "eos_token_id": eos_id, "pad_token_id": None}
    values: dict[str, Any] = {"vocab_size": vocab_size, **ends, **given}
    kind = values.pop("model_type", None)
    if not isinstance(kind, str):
        raise TrainingError(f"adapt.scratch needs a model_type, such as mistral or qwen3, got {kind!r}")
    with explained("adapt.scratch"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))


def _with_lora(model: PreTrainedModel, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise TrainingError('adapt.method = "lora" needs PEFT: pip install peft') from error
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0))


def for_export(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that transformers saves and loads: adapters are merged into a copy of the base."""
    return methodcaller("merge_and_unload")(copy.deepcopy(model)) if hasattr(model, "merge_and_unload") else model
