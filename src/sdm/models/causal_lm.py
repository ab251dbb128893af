"""Any causal LM of transformers, grafted or not, as a run trains it: how it is loaded, its loss, its carried states.

Shapes: B rows, T time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from sdm.constants import IGNORED
from sdm.files import explained, read_json
from sdm.layers.interface import without_weight_decay
from sdm.models.cache import SDMCache
from sdm.models.configuration import check_attention_implementation
from sdm.models.fingerprint import is_grafted
from sdm.models.graft import blocks
from sdm.models.grafted_mixer import GraftedMixer, memory_cache
from sdm.models.likelihood import States
from sdm.models.modeling import SDMForCausalLM
from sdm.models.saved_folder import CONFIG, WEIGHTS, no_progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def load_foreign_model(path: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load any causal language model that transformers knows.

    Args:
        path: a folder with config.json and weights as safetensors.
        dtype: precision of the weights; None: as they were saved.

    Raises:
        UserError: if the folder names a kernel or weights outside of it, or if weights are missing.
    """
    from transformers import AutoModelForCausalLM

    with explained(f"cannot load the model in {path}"), no_progress_bar():
        fields = read_json(path / CONFIG)
        check_attention_implementation(fields)
        if fields.get("transformers_weights") is not None:  # transformers would read that file, whatever it is
            raise ValueError(f"transformers_weights in {CONFIG} must be left out, the weights are in {WEIGHTS}")
        loaded: object = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # other formats are pickles
            dtype="auto" if dtype is None else dtype,
            output_loading_info=True,
        )
        model, info = cast(tuple[PreTrainedModel, dict[str, list[str]]], loaded)
        for fault in ("missing_keys", "mismatched_keys"):  # transformers would fill them with random numbers
            if info.get(fault):
                names = sorted(map(str, info[fault]))
                raise ValueError(f"{fault.removesuffix('_keys')} weights: {', '.join(names[:5])}")
    if is_length_dependent(model.config):
        model.register_forward_pre_hook(_reset_rope, with_kwargs=True)
    return model


def is_length_dependent(config: PreTrainedConfig) -> bool:
    """Whether a token's position embedding depends on the length of the sequence at hand (longrope, dynamic NTK).

    Such a model gives other numbers for the first part of a document than for the whole, and for a row beside a longer
    one than for the row alone. A short trial cannot show it: frequencies change beyond the length of pretraining.
    """
    return any(kind in ("longrope", "su") or "dynamic" in kind for kind in _rope_types(config.to_dict()))


def _rope_types(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            if name == "rope_scaling" and isinstance(value.get("type"), str):  # the older form
                yield value["type"]
            yield from _rope_types(value)
        elif name == "rope_type" and isinstance(value, str):
            yield value


def _reset_rope(model: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
    """Forget the longest sequence so far, where a new one begins: dynamic frequencies would be those of that one."""
    cache = kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        return
    for module in model.modules():
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            prefix = name.removesuffix("max_seq_len_cached")
            frequencies = getattr(module, f"{prefix}inv_freq", None)
            original = getattr(module, f"{prefix}original_inv_freq", None)
            if isinstance(frequencies, Tensor) and isinstance(original, Tensor):
                module.register_buffer(f"{prefix}inv_freq", original.to(frequencies.device), persistent=False)
                setattr(module, name, module.original_max_seq_len)


def carried_layers(model: nn.Module) -> list[Any]:
    """Return the layers whose states a stream carries on: all mixers of our models, the memories of grafted ones."""
    if isinstance(model, SDMForCausalLM):
        return [block.mixer for block in model.model.layers]
    return [module.memory for module in model.modules() if isinstance(module, GraftedMixer)]


def empty_cache(model: PreTrainedModel) -> Cache:
    """Return a cache without tokens for a model: ours, a grafted one or any other of transformers."""
    if isinstance(model, SDMForCausalLM):
        return SDMCache(model.config)
    return model.new_cache() if is_grafted(model) else DynamicCache(config=model.config)


def exempt_from_decay(model: nn.Module) -> set[str]:
    """Return the names of the parameters that weight decay would harm: norms, biases, gates, initial states."""
    if isinstance(model, SDMForCausalLM):
        return model.no_weight_decay()
    vectors = {name for name, x in model.named_parameters() if x.dim() < 2}
    memories = {f"{path}.memory": x.memory for path, x in model.named_modules() if isinstance(x, GraftedMixer)}
    return vectors | {f"{path}.{name}" for path, memory in memories.items() for name in without_weight_decay(memory)}


def causal_nll(
    model: PreTrainedModel,
    input_ids: Tensor,
    targets: Tensor,
    cu_seqlens: Tensor | None = None,
    states: States | None = None,
    carry: bool = False,
    begins: Tensor | None = None,
    distill: float = 0.0,
    distill_tokens: int = 0,
    teacher: nn.Module | None = None,
) -> tuple[Tensor, States | None]:
    """Return the summed nats of the targets [B,T] by a model of transformers, and with `carry` its memories' states.

    Only the states of grafted memories are carried on: attention starts anew with the tokens at hand.

    Args:
        model: a causal LM; the arguments after cu_seqlens need a grafted one.
        input_ids: [B,T].
        targets: the token to predict after each of input_ids, -100 where there is none.
        cu_seqlens: offsets of documents packed into one row.
        states: one per memory, to begin from; None: the streams begin.
        carry: whether to return the states after the last token.
        begins: [B], the rows that begin anew in spite of the states.
        distill: weight of the divergence from the base on the first `distill_tokens` tokens of each row, which is added
            to their nats.
        distill_tokens: tokens that the base has context enough for.
        teacher: the base as it was; None: `model` without its memories, the same as long as the base is frozen.
    """
    options: dict[str, Any] = {"use_cache": False}
    layers = []
    if cu_seqlens is not None:
        options["position_ids"] = _positions(cu_seqlens, input_ids.shape[1]).to(input_ids.device)
    if states is not None or carry:
        cache = DynamicCache(config=model.config)
        count = len(blocks(model))
        layers = [memory_cache(cache, x.block, count) for x in model.modules() if isinstance(x, GraftedMixer)]
        for layer, state in zip(layers, states or (), strict=states is not None):
            layer.state, layer.begins = state, begins
        options = {"past_key_values": cache, "use_cache": True}
    logits = model(input_ids, **options).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    if distill:
        ids = input_ids[:, :distill_tokens]
        with torch.no_grad(), contextlib.nullcontext() if teacher is not None else memories_off(model):
            wanted = (model if teacher is None else teacher)(ids, use_cache=False).logits.float().log_softmax(-1)
        ours = logits[:, : ids.shape[1]].log_softmax(-1)
        total = total + distill * F.kl_div(ours, wanted, reduction="sum", log_target=True)
    return total, [layer.state for layer in layers if layer.state is not None] if carry else None


def _positions(cu_seqlens: Tensor, length: int) -> Tensor:
    """Positions [1,T] that start at 0 with each document."""
    places = torch.arange(length, device=cu_seqlens.device)
    begin = cu_seqlens[torch.searchsorted(cu_seqlens, places, right=True) - 1]
    return (places - begin).unsqueeze(0)


@contextlib.contextmanager
def memories_off(model: nn.Module) -> Iterator[None]:
    """Let a grafted model compute what its base computes."""
    mixers = [module for module in model.modules() if isinstance(module, GraftedMixer)]
    try:
        for mixer in mixers:
            mixer.enabled = False
        yield
    finally:
        for mixer in mixers:
            mixer.enabled = True
