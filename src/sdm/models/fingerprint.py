"""What identifies a model, so that a state of another one is not mistaken for its own."""

from __future__ import annotations

import copy
import json
import weakref
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from sdm.layers.interface import SequenceLayer
from sdm.models.configuration import SDMConfig, model_fields
from sdm.models.fields import documented_fields
from sdm.models.layer_types import LAYER_TYPES, layer_fields

if TYPE_CHECKING:
    from sdm.models.grafted_model import GraftedModel

# Fields that change neither the meaning nor the numbers of a state.
_FREE = {
    "backend",
    "bos_token_id",
    "eos_token_id",
    "global_layer",
    "global_layer_interval",
    "initializer_range",
    "intermediate_multiple",
    "loss_chunk_size",
    "max_position_embeddings",
    "pad_token_id",
    "tie_word_embeddings",
    "use_cache",
}


@dataclass(frozen=True)
class Fingerprint:
    """The architecture, and checksums of the weights and of the buffers that are saved with them."""

    architecture: dict[str, Any]
    weights: str
    buffers: str

    def check(self, other: Fingerprint, what: str) -> None:
        """Raise a ValueError that says what differs."""
        for name in sorted(self.architecture.keys() | other.architecture.keys()):
            mine, theirs = self.architecture.get(name), other.architecture.get(name)
            if mine != theirs:
                raise ValueError(f"{what} is of another model: its {name} is {mine!r}, expected {theirs!r}")
        if self.weights != other.weights:
            raise ValueError(f"{what} is of another model: the architecture is the same, but the weights differ")
        if self.buffers != other.buffers:
            raise ValueError(
                f"{what} is of another model: the weights are the same, but buffers, such as the statistics of a batch "
                "normalisation, differ"
            )


_known: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Fingerprint]] = weakref.WeakKeyDictionary()


def fingerprint(model: nn.Module, again: bool = False) -> Fingerprint:
    """The fingerprint of a model, worked out again when its weights or buffers have changed.

    Those that were changed through `.data` do not tell; `again` does not rely on it.
    """
    if is_grafted(model):
        return _grafted_fingerprint(model, again)
    base = base_model(model)
    tensors = dict(base.named_parameters()), _saved_buffers(base)
    weights = [(x.data_ptr(), x._version, x.dtype) for group in tensors for x in group.values()]
    version = (repr(base.config.rope_parameters), weights)
    if again or base not in _known or _known[base][0] != version:
        _known[base] = (version, Fingerprint(architecture(base.config), *map(checksum, tensors)))
    return _known[base][1]


def _grafted_fingerprint(model: GraftedModel, again: bool) -> Fingerprint:
    """Of the base's class and configuration, the graft, and the weights of both."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    tensors = parameters, _saved_buffers(model)
    version = [(x.data_ptr(), x._version, x.dtype) for group in tensors for x in group.values()]
    if again or model not in _known or _known[model][0] != version:
        fields = json.loads(model.config.to_json_string(use_diff=False))
        settings = {"transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype"}
        named = {
            f"base.{name}": value
            for name, value in fields.items()
            if name not in settings and not name.endswith("_token_id")
        }
        graft = json.loads(json.dumps({f"graft.{name}": x for name, x in vars(model.graft_config).items()}))
        graft.pop("graft.freeze_base")
        table = model.get_input_embeddings().get_parameter("weight")
        sizes = {"class": type(model).base_class.__name__, "vocab_size": len(table)}
        _known[model] = (version, Fingerprint({**sizes, **named, **graft}, *map(checksum, tensors)))
    return _known[model][1]


def is_grafted(model: object) -> TypeGuard[GraftedModel]:
    """Whether a model is one of transformers with grafted memories, adapted (peft) or not."""
    return hasattr(model, "graft_config")


def mixers_of(model: object) -> list[SequenceLayer]:
    """The sequence layers of an `SDMModel`, of one with a head, or of an adapted one."""
    return [cast(SequenceLayer, block.mixer) for block in base_model(model).layers]


def base_model(model: object) -> Any:
    """The SDMModel within a model with a head, or within an adapted one (peft)."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return getattr(model, "model", model)


def architecture(config: SDMConfig) -> dict[str, Any]:
    """The fields of all models and of the layers of this one that give a state its meaning."""
    kinds = [LAYER_TYPES[name] for name in dict.fromkeys(config.layer_types or ())]
    others = layer_fields().keys() - {field.name for kind in kinds for field in documented_fields(kind.fields)}
    free = _FREE.union(others, *(kind.free_fields for kind in kinds))
    return {name: copy.deepcopy(getattr(config, name)) for name in model_fields() if name not in free}


def comparable(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What a file says of an architecture. It may say more, of layers that the model has not, and knows nothing of
    fields that were added since."""
    return {name: before.get(name, value) for name, value in now.items()}


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The others follow from the configuration."""
    buffers = dict(model.named_buffers())
    saved = model.state_dict().keys() if buffers else set()
    return {name: x for name, x in buffers.items() if name in saved}


def checksum(tensors: dict[str, Tensor]) -> str:
    """CRC-32 of the names, dtypes, shapes and bytes of tensors, as eight hexadecimal digits."""
    value = 0
    for name, x in tensors.items():
        value = zlib.crc32(_bytes(x.detach()), zlib.crc32(f"{name} {x.dtype} {list(x.shape)}".encode(), value))
    return f"{value:08x}"


def _bytes(x: Tensor) -> memoryview:
    return x.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
