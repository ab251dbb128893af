"""Graft: sparse delta memories in parallel to the mixers of a pretrained causal LM.

The output projection of a memory starts at zero, so that a grafted model computes exactly what its base computes until
it is trained. The aids that a memory needs in order to start learning beside a trained model are on by default: keys
from a convolution that starts as the token before, and W_q equal to W_k. Both are ours; the paper's models use neither.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sdm.errors import UserError, check_not_negative, check_one_of, check_size
from sdm.layers import GatedDeltaNet, ShiftedKeys, SparseDeltaMemory
from sdm.layers.sizes import default_heads
from sdm.models.attention_window import WindowedAttention, window_reason
from sdm.models.grafted_mixer import GraftedMemory, GraftedMixer
from sdm.models.layer_types.base import selection_flops
from sdm.models.layer_types.shared import delta_flops

if TYPE_CHECKING:
    from sdm.models.grafted_model import GraftedModel

_log = logging.getLogger(__name__)

KINDS = ("sdm", "gdn")
HEAD_CHANNELS = 256
SMALLEST_SIDE = 32

# What transformers' blocks call the module that mixes tokens.
_MIXERS = (
    *("self_attn", "attn", "attention", "self_attention", "linear_attn", "mixer", "mamba", "temporal_block"),
    *("conv", "time_mixer"),
)


@dataclass(frozen=True)
class GraftConfig:
    """What was grafted, as it is saved beside the weights."""

    layers: tuple[int, ...]
    """Indices of the blocks that have a memory."""
    kind: str = "sdm"
    """Kind of the memory: "sdm", or "gdn" for a gated delta net to compare with."""
    num_heads: int = 1
    """Heads of each memory."""
    num_slots: int = 1024
    """Slots per head of SDM."""
    num_writes: int = 16
    """Slots that a token writes, per head of SDM."""
    num_reads: int = 16
    """Slots that a token reads, per head of SDM."""
    learned_initial_state: bool = True
    """Whether SDM starts from a learned table M0 instead of zeros."""
    key_convolution: int = 4
    """Taps of the convolution that keys come from, which starts as the token before; 0: none."""
    tie_query_initialization: bool = True
    """Whether W_q starts equal to W_k."""
    norm_eps: float = 1.0
    """Added to the mean square of what a head reads before it is normalised."""
    attention_window: int | None = None
    """Tokens that full attention sees; None: all."""
    attention_sinks: int = 0
    """First tokens of a stream that windowed attention sees too."""
    freeze_base: bool = True
    """Whether only the memories are trained."""


@dataclass(frozen=True)
class GraftCost:
    """What grafted memories add to their base."""

    parameters: int
    base_parameters: int
    state_elements: int
    """Elements of the state of one stream."""
    flops: int
    """FLOPs of one token."""
    base_flops: int
    """FLOPs of one token of the base, attention over earlier tokens not included; of experts, the active ones count."""

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} parameters ({100 * self.parameters / self.base_parameters:.1f} % of the base), "
            f"a state of {self.state_elements:,} elements per stream, "
            f"{self.flops:,} FLOPs per token ({100 * self.flops / self.base_flops:.1f} % of the base)"
        )


def graft(
    model: PreTrainedModel,
    layers: Sequence[int] | None = None,
    *,
    kind: str = "sdm",
    num_heads: int | None = None,
    num_slots: int | None = None,
    num_writes: int | None = None,
    num_reads: int | None = None,
    learned_initial_state: bool = True,
    key_convolution: int = 4,
    tie_query_initialization: bool = True,
    norm_eps: float = 1.0,
    attention_window: int | None = None,
    attention_sinks: int = 0,
    freeze_base: bool = True,
) -> PreTrainedModel:
    """Put a memory in parallel to the mixer of chosen blocks of a transformers causal LM.

    The model is changed in place. Until it is trained, its logits equal those of the base bit for bit. Its memories
    keep their state in the model's own cache, so that `generate`, `Trainer`, TRL and PEFT work as before.

    Args:
        model: a causal LM of transformers, neither quantised nor offloaded nor tensor-parallel.
        layers: indices of the blocks that get a memory. By default the one in the middle.
        kind: "sdm", or "gdn" for a gated delta net to compare with.
        num_heads: heads of each memory. By default one for 256 channels of the model, as near as its width allows.
        num_slots: slots per head, a square. By default (channels of a head / 4)^2, and at least 1,024.
        num_writes: slots that a token writes per head. By default half of sqrt(num_slots), at most 64.
        num_reads: slots that a token reads per head. By default as num_writes.
        learned_initial_state: start from a learned table M0 instead of zeros.
        key_convolution: taps of a convolution that the keys come from, which starts as the token before. 0 leaves it
            out: the memory then hardly learns beside a frozen base.
        tie_query_initialization: start with W_q equal to W_k.
        norm_eps: added to the mean square of what a head reads before it is normalised. At 1 a small reading, that of a
            key that was never written, stays small; at 1e-6, as in a layer of its own, it becomes noise of full size.
        attention_window: limit full attention to so many tokens, for decoding at constant cost.
        attention_sinks: first tokens of a stream that windowed attention sees too.
        freeze_base: train the memories only.

    Returns:
        The same model. Its class derives from the one it had, `sdm.models.grafted_model.GraftedModel` is another base:
        `save_pretrained`, `save_graft`, `prepare_cache`, `graft_config`, `graft_cost`.

    Raises:
        UserError: the model or an argument is unsuitable. The model is unchanged.
    """
    from sdm.models.grafted_model import grafted_class

    if _is_grafted(model):
        raise UserError("model is grafted already; name all blocks in one call, or call sdm.ungraft(model) first")
    check_base(model)
    if layers is None:
        layers = (len(blocks(model)) // 2,)
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise UserError(f"layers must be a list of indices of blocks, such as [0], got {layers!r}")
    width = hidden_size(model)
    defaults = default_sizes(width, num_heads, num_slots)
    config = GraftConfig(
        layers=tuple(layers),
        kind=kind,
        num_heads=defaults["num_heads"],
        num_slots=defaults["num_slots"],
        num_writes=num_writes if num_writes is not None else defaults["num_writes"],
        num_reads=num_reads if num_reads is not None else (num_writes or defaults["num_writes"]),
        learned_initial_state=learned_initial_state,
        key_convolution=key_convolution,
        tie_query_initialization=tie_query_initialization,
        norm_eps=norm_eps,
        attention_window=attention_window,
        attention_sinks=attention_sinks,
        freeze_base=freeze_base,
    )
    trainable = {name for name, x in model.named_parameters() if x.requires_grad}
    insert(model, config)
    object.__setattr__(model, "__class__", grafted_class(type(model), config))  # type: ignore[arg-type]
    assert _is_grafted(model)
    model._sdm_trainable = trainable
    _log.info("grafted onto %s: %s", ", ".join(f"block {index}" for index in config.layers), model.graft_cost)
    return model


def ungraft(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the memories of a grafted model, in place. What is left is its base, of its class.

    Parameters are trainable again that were before the graft; weights that were trained since stay as they are.
    """
    if not _is_grafted(model):
        raise UserError(f"model is not grafted: {type(model).__name__} has no memories to remove")
    for block in blocks(model):
        name = mixer_name(block)
        mixer = getattr(block, name)
        while isinstance(mixer, (GraftedMixer, WindowedAttention)):
            mixer = mixer.mixer
            mixer.__dict__.pop("sdm_window", None)
        setattr(block, name, mixer)
    trainable = model._sdm_trainable
    model.__dict__.pop("_sdm_trainable", None)
    object.__setattr__(model, "__class__", type(model).base_class)
    for name, x in model.named_parameters():
        x.requires_grad_(x.is_floating_point() and (trainable is None or name in trainable))
    return model


def _is_grafted(model: object) -> TypeGuard[GraftedModel]:
    return isinstance(getattr(model, "graft_config", None), GraftConfig)


def insert(model: PreTrainedModel, config: GraftConfig) -> None:
    """Build the memories and put them into the blocks, or raise before anything changes."""
    places = blocks(model)
    check_config(config, len(places))
    width = hidden_size(model)
    mixers: list[Any] = [getattr(block, mixer_name(block), None) for block in places]
    for index in config.layers:
        _check_mixer(places[index], mixers[index], index, mixers)
    windowed: list[int] = []
    if config.attention_window is not None:
        reasons = [window_reason(model, index, mixer) for index, mixer in enumerate(mixers)]
        windowed = [index for index, reason in enumerate(reasons) if reason is None]
        if not windowed:
            raise UserError(f"attention_window limits full attention, and there is none to limit: {reasons[0]}")
    memories: dict[int, GraftedMemory] = {}
    for index in config.layers:
        example = next(x for x in mixers[index].parameters() if x.is_floating_point())
        memories[index] = build_memory(width, config).to(device=example.device, dtype=example.dtype)
    if config.freeze_base:
        model.requires_grad_(False)
    for index, block in enumerate(places):
        mixer = mixers[index]
        if index in windowed:
            assert config.attention_window is not None
            mixer = WindowedAttention(mixer, config.attention_window, config.attention_sinks, index, len(places))
        if index in memories:
            mixer = GraftedMixer(mixer, memories[index].train(model.training), index, len(places))
        if mixer is not mixers[index]:
            setattr(block, mixer_name(block), mixer.train(model.training))


def build_memory(width: int, config: GraftConfig) -> GraftedMemory:
    """Return a memory whose output is zero until it is trained."""
    layer: SparseDeltaMemory | GatedDeltaNet
    if config.kind == "sdm":
        layer = SparseDeltaMemory(
            width,
            config.num_heads,
            config.num_slots,
            config.num_writes,
            config.num_reads,
            config.learned_initial_state,
        )
    else:
        # The convolution in front of the keys takes the place of the short convolutions.
        layer = GatedDeltaNet(width, default_heads(width, None), conv_size=0 if config.key_convolution else 4)
    for projection in (layer.query_proj, layer.key_proj, layer.value_proj, layer.gate_proj):
        nn.init.normal_(projection.weight, std=width**-0.5)
    if config.tie_query_initialization:
        with torch.no_grad():
            layer.query_proj.weight.copy_(layer.key_proj.weight)
    nn.init.zeros_(layer.out_proj.weight)
    layer.output_norm.eps = config.norm_eps
    return ShiftedKeys(layer, config.key_convolution) if config.key_convolution else layer


def default_sizes(width: int, num_heads: int | None, num_slots: int | None) -> dict[str, int]:
    """Derive the sizes of a memory from the width of the base.

    A head for 256 channels, (channels / 4)^2 slots and at least 1,024 of them: the state then grows with the width, not
    with its cube. Half as many writes as the square root of the slots, at most 64.
    """
    if num_heads is None:
        wanted = max(1, round(width / HEAD_CHANNELS))
        num_heads = next(count for count in range(wanted, 0, -1) if width % count == 0)
    check_size(num_heads=num_heads)
    if num_slots is None:
        num_slots = max(SMALLEST_SIDE, width // num_heads // 4) ** 2
    check_size(num_slots=num_slots)
    writes = max(1, min(64, math.isqrt(num_slots) // 2))
    return {"num_heads": num_heads, "num_slots": num_slots, "num_writes": writes}


def check_base(model: PreTrainedModel) -> None:
    """Raise unless the model is one that can be grafted onto."""
    name = type(model).__name__
    if hasattr(model, "peft_config"):
        raise UserError(f"model has PEFT adapters ({name}); graft the base first, then add the adapters")
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"model must be a causal LM of transformers, got {name}")
    if model.config.model_type == "sdm":
        raise UserError("model has memories of its own; choose its layers by SDMConfig(layer_types=...)")
    if getattr(model.config, "is_encoder_decoder", False) or name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise UserError(f"model must be a causal LM, which AutoModelForCausalLM loads; {name} is not")
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise UserError(f"model is quantised ({name}); load it without quantization_config")
    if any(hasattr(module, "_hf_hook") for module in model.modules()) or any(x.is_meta for x in model.parameters()):
        raise UserError("model is offloaded or dispatched over devices (device_map); load it onto one device")
    sharded = any(hasattr(x, "placements") for x in model.parameters())
    if sharded or (getattr(model, "_tp_size", None) or 1) > 1:
        raise UserError("model is tensor-parallel or sharded; graft it before it is distributed")
    blocks(model)


def check_config(config: GraftConfig, num_blocks: int) -> None:
    """Raise unless the settings are possible for a model of so many blocks."""
    if not config.layers:
        raise UserError("layers must name at least one block")
    for index in config.layers:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < num_blocks:
            raise UserError(f"layers must be indices of blocks, 0 ... {num_blocks - 1}, got {index!r}")
    if len(set(config.layers)) < len(config.layers):
        raise UserError(f"layers names a block more than once: {list(config.layers)}")
    check_one_of(KINDS, kind=config.kind)
    if config.key_convolution:
        check_size(key_convolution=config.key_convolution)
    if config.attention_window is not None:
        check_size(attention_window=config.attention_window)
    check_not_negative(attention_sinks=config.attention_sinks)
    if not 0 < config.norm_eps < math.inf:
        raise UserError(f"norm_eps must be a positive number, got {config.norm_eps}")
    if config.attention_sinks and config.attention_window is None:
        raise UserError("attention_sinks needs an attention_window")


def _check_mixer(block: nn.Module, mixer: nn.Module | None, index: int, mixers: list[nn.Module | None]) -> None:
    if not isinstance(mixer, nn.Module):
        names = ", ".join(name for name, _ in block.named_children())
        raise UserError(f"block {index} ({type(block).__name__}) has no mixer that is known; its modules are {names}")
    if sum(other is mixer for other in mixers) > 1:
        raise UserError(f"block {index} shares its mixer with other blocks; a memory needs a mixer of its own")
    if any(getattr(module, "is_causal", True) is False for module in mixer.modules()):
        raise UserError(f"the mixer of block {index} ({type(mixer).__name__}) is not causal: a memory cannot follow it")
    if not all(x.is_floating_point() for x in mixer.parameters()):
        raise UserError(f"the mixer of block {index} ({type(mixer).__name__}) has quantised weights")


def blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of blocks of a model."""
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and mixer_name(module[0]):
            return module
    raise UserError(f"{type(model).__name__} has no list of {count} blocks with a causal mixer, which a memory needs")


def mixer_name(block: nn.Module) -> str:
    """Return the name of the mixer of a block, "" if there is none."""
    return next((name for name in _MIXERS if isinstance(getattr(block, name, None), nn.Module)), "")


def hidden_size(model: PreTrainedModel) -> int:
    """Return the width of the stream that the blocks read and write."""
    return int(model.config.get_text_config(decoder=True).hidden_size)


def graft_cost(model: PreTrainedModel, config: GraftConfig) -> GraftCost:
    """Count what the memories of a grafted model cost."""
    memories = [module.memory for module in model.modules() if isinstance(module, GraftedMixer)]
    parameters = sum(x.numel() for memory in memories for x in memory.parameters())
    every = sum(x.numel() for x in model.parameters())
    state = sum(x.numel() for memory in memories for x in memory.start_state(1).tensors().values())
    return GraftCost(
        parameters, every - parameters, state, sum(map(_memory_flops, memories)), _base_flops(model, every - parameters)
    )


def _memory_flops(memory: GraftedMemory) -> int:
    layer = memory.layer if isinstance(memory, ShiftedKeys) else memory
    matrices = 2 * sum(x.numel() for name, x in layer.named_parameters() if name.endswith("proj.weight"))
    if isinstance(layer, SparseDeltaMemory):
        side = math.isqrt(layer.num_slots)
        chosen = selection_flops(side, layer.num_writes) + selection_flops(side, layer.num_reads)
        return matrices + layer.num_heads * (delta_flops(layer.num_writes, layer.num_reads, layer.head_dim) + chosen)
    assert isinstance(layer, GatedDeltaNet)
    return matrices + layer.num_heads * delta_flops(layer.key_dim, layer.key_dim, layer.head_dim)


def _base_flops(model: PreTrainedModel, parameters: int) -> int:
    """Two per parameter that a token is multiplied with."""
    config = model.config.get_text_config(decoder=True)
    table = model.get_input_embeddings().get_parameter("weight")
    head = model.get_output_embeddings()
    if head is None or head.get_parameter("weight") is not table:  # a tied table is used as a matrix too
        parameters -= table.numel()
    experts = sum(x.numel() for name, x in model.named_parameters() if ".experts." in name)
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    active = getattr(config, "num_experts_per_tok", None) or count
    return int(2 * (parameters - experts * (1 - active / count)))


def to_json(config: GraftConfig) -> dict[str, object]:
    """Return the settings as JSON has them."""
    return dataclasses.asdict(config) | {"layers": list(config.layers)}


def from_json(fields: dict[str, object], where: str) -> GraftConfig:
    """Read settings that `to_json` wrote."""
    known = {field.name for field in dataclasses.fields(GraftConfig)}
    layers = fields.get("layers")
    if set(fields) - known or not isinstance(layers, list):
        raise UserError(f"{where} does not describe a graft that this version knows: {sorted(set(fields) - known)}")
    # Files from before the field was there hold memories that were trained with the norm of a layer of its own.
    return GraftConfig(**{"norm_eps": 1e-6, **fields, "layers": tuple(layers)})  # type: ignore[arg-type]
