"""The configuration of a hybrid model. A few sizes are enough; everything else follows from them.

transformers can read a saved folder also where this package is not imported. Its base class checks `layer_types`
against a list of its own, so ours have another key in config.json; and `auto_map` names a small file beside it that
imports this package.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, get_args

from huggingface_hub.dataclasses import strict, type_validator
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from sdm.errors import nearest
from sdm.files import write_bytes
from sdm.layers.sizes import default_head_dim
from sdm.models.fields import Field, documented_fields
from sdm.models.layer_types import LAYER_TYPES, LayerFields, layer_fields, layer_names
from sdm.models.layer_types.attention import check_rope
from sdm.models.layer_types.base import check_choices, check_numbers, check_sizes
from sdm.ops.backends import BACKENDS, check_backend

# What layer_types is derived from.
_PATTERN = {"num_hidden_layers", "global_layer", "global_layer_interval", "local_layer"}

# What transformers itself hands to a config beside its fields.
_TRANSFORMERS_KEYS = {
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
}
# In config.json.
_LAYER_TYPES = "sdm_layer_types"
_CODE = "modeling_sdm"
_AUTO_MAP = {
    "AutoConfig": f"{_CODE}.SDMConfig",
    "AutoModel": f"{_CODE}.SDMModel",
    "AutoModelForCausalLM": f"{_CODE}.SDMForCausalLM",
    "AutoModelForSequenceClassification": f"{_CODE}.SDMForSequenceClassification",
    "AutoModelForTokenClassification": f"{_CODE}.SDMForTokenClassification",
}


@strict
class SDMConfig(LayerFields, PreTrainedConfig):
    """Configuration of a hybrid model: a stack of blocks, each a sequence layer followed by a gated MLP.

    By default three blocks of sliding-window attention are followed by one with a global layer.
    `SDMConfig(vocab_size=97, hidden_size=128, num_hidden_layers=4, global_layer="sdm")` is a working model. Fields that
    are None are derived and then hold the derived value. Values that cannot work raise an error naming the field.

    The fields of the layers are inherited from `sdm.models.layer_types.LayerFields`. Layer types that were registered
    from outside the package add fields of their own, which are accepted in the same way.
    """

    model_type = "sdm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    default_theta = 500_000.0
    # Only what is exact on every rank. The sequence layers count all of their heads, and the norms over a head's
    # channels and the addresses of a memory need all channels: each rank computes these layers whole.
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "embed_tokens": "free_full_weight",
        "layers.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    vocab_size: int = 128_256
    """Tokens in the vocabulary."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_hidden_layers: int = 11
    """Number of blocks."""
    global_layer: str | list[str] | None = None
    """What the global layers are; or a list that they take in turn, starting anew at its end: ["full_attention", "sdm"]
    is the paper's mixed hybrid. Derived: "sdm"."""
    global_layer_interval: int = 4
    """Every how many blocks a global layer comes; the others are local. 1 makes every layer global."""
    local_layer: str = "sliding_attention"
    """What the other blocks are: "sliding_attention", or "token_shift" for very small models."""
    layer_types: list[str] | None = None
    """The layer of every block, instead of the pattern: a local or a global one."""
    intermediate_size: int | None = None
    """Hidden width of the MLP. Derived: 8/3 hidden_size, rounded up to intermediate_multiple."""
    intermediate_multiple: int = 64
    """What intermediate_size is rounded up to."""
    num_attention_heads: int | None = None
    """Heads of both kinds of attention, of GDN and of Mamba2. Derived: hidden_size / head_dim."""
    head_dim: int | None = None
    """Channels per head. Derived: the largest power of two up to 128 that leaves at least four heads."""
    rope_parameters: dict | None = None
    """The rotary embedding of attention, as transformers has it: {"rope_theta": its base} and, to stretch it,
    "rope_type" "linear", "yarn" or "llama3" with what that needs; `rope_theta=...` is taken as well."""
    max_position_embeddings: int | None = 2**20
    """Length beyond which the model warns, once; None: never. No layer needs a limit."""
    hidden_act: str = "silu"
    """Activation of the MLP."""
    rms_norm_eps: float | int = 1e-6
    """Epsilon of every RMS norm."""
    initializer_range: float | int = 0.02
    """Standard deviation of the weights at initialisation."""
    loss_chunk_size: int | None = 1024
    """Tokens whose logits are in memory together when a training step computes its loss. None computes them all at once
    and returns them."""
    backend: str = "auto"
    """Backend of the ops, see `sdm.ops.available_backends()`."""
    use_cache: bool = True
    """Whether a forward pass without gradients returns a cache."""
    tie_word_embeddings: bool = False
    """Whether the output projection is the embedding."""
    pad_token_id: int | None = None
    """Token of padding."""
    bos_token_id: int | None = None
    """Token that a text begins with."""
    eos_token_id: int | list[int] | None = None
    """Token that a text ends with."""

    def __post_init__(self, **kwargs: Any) -> None:
        # What config.json holds is taken as it is: `SDMConfig(**config.to_diff_dict())`.
        kwargs = _from_file(kwargs)
        self.layer_types = kwargs.pop("layer_types", self.layer_types)
        for name in self._unknown(kwargs):
            raise TypeError(f"SDMConfig has no field {name!r}{_nearest(name)}")
        # Fields of layer types from outside the package; those of the built-in ones are fields of this class.
        for name, field in layer_fields().items():
            if name in self.__dataclass_fields__:
                continue
            value = kwargs.pop(name, field.default)
            type_validator(name, value, field.type)
            setattr(self, name, value)
        self.derive()
        # TRL reads it off every configuration; transformers adds the user's own classes to it.
        self.auto_map: dict[str, str] = kwargs.pop("auto_map", None) or {}
        super().__post_init__(**kwargs)
        self.validate_rope()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration that a file holds; `kwargs` override its fields before anything is derived from them.

        A file may hold what this version does not know, and a user what he has set on a config. It is kept.
        """
        check_attention_implementation(config_dict)
        config_dict = _from_file(config_dict)
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in model_fields()}
        if given.keys() & _PATTERN and "layer_types" not in given:
            config_dict.pop("layer_types", None)
        extra = {name: config_dict.pop(name) for name in cls._unknown(config_dict)}
        if extra:
            names = ", ".join(f"{name!r}{_nearest(name)}" for name in extra)
            warnings.warn(f"SDMConfig keeps fields of the file that it does not know: {names}", stacklevel=2)
        loaded = super().from_dict(config_dict | given, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, value in extra.items():
            setattr(config, name, value)
        return loaded

    @classmethod
    def from_json_file(cls, json_file: str | PathLike[str]) -> Any:
        """Read a configuration from a JSON file."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    def to_dict(self) -> dict[str, Any]:
        """All fields by name. PEFT calls it before it looks up the default target modules of a model type."""
        from sdm.models.registration import register_with_peft  # which imports the models

        register_with_peft()
        return super().to_dict()

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        return _to_file(super().to_diff_dict())

    def save_pretrained(self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: object) -> None:
        """Write config.json, and beside it the file of code that its `auto_map` names."""
        _write_code(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """A saved folder names its code anyway. For a class of your own, it is as in transformers."""
        if cls is not SDMConfig:
            super().register_for_auto_class(auto_class)

    def derive(self) -> None:
        """Check the fields and fill in those that are None. A model does it again, for fields that were set since."""
        self._check_fields()
        self._derive_layers()
        self._derive_heads()
        if self.intermediate_size is None:
            multiple = self.intermediate_multiple
            self.intermediate_size = math.ceil(8 * self.hidden_size / (3 * multiple)) * multiple
        for kind in LAYER_TYPES.values():
            kind.derive(self)
        for name in dict.fromkeys(self.layer_types or ()):
            LAYER_TYPES[name].check(self)
            check_backend(self.backend, *LAYER_TYPES[name].ops)

    def validate_layer_type(self) -> None:
        """transformers knows a fixed list of layer types; ours are checked when they are derived."""

    def validate_rope(self) -> None:
        """transformers warns of what cannot work; here it raises."""
        check_rope(self)

    @classmethod
    def _unknown(cls, values: dict[str, Any]) -> list[str]:
        known = _TRANSFORMERS_KEYS | set(GenerationConfig._get_default_generation_params())
        known |= model_fields().keys() | cls.__dataclass_fields__.keys()
        return [name for name in values if name not in known and not name.startswith("_")]

    def takes_none(self, name: str) -> bool:
        """Tell whether the type of a field allows None."""
        return type(None) in get_args(model_fields()[name].type)

    def _check_fields(self) -> None:
        check_sizes(
            self,
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "global_layer_interval",
            "intermediate_size",
            "intermediate_multiple",
            "num_attention_heads",
            "head_dim",
            "max_position_embeddings",
            "loss_chunk_size",
        )
        check_numbers(self, "initializer_range")
        check_numbers(self, "rms_norm_eps", positive=True)
        backends = ("auto", *dict.fromkeys(backend.name for op in BACKENDS.values() for backend in op))
        check_choices(self, local_layer=layer_names("local"), hidden_act=("silu",), backend=backends)

    def _derive_layers(self) -> None:
        if self.global_layer is not None:
            kinds = [self.global_layer] if isinstance(self.global_layer, str) else list(self.global_layer)
            _check_layers("global_layer", kinds, layer_names("global"))
        if self.layer_types is None:
            self.global_layer = self.global_layer or "sdm"
            self.layer_types = self._pattern()
            return
        _check_layers("layer_types", self.layer_types, layer_names())
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, but num_hidden_layers = {self.num_hidden_layers}"
            )
        global_layers = [kind for kind in self.layer_types if LAYER_TYPES[kind].scope == "global"]
        if self.global_layer is None:
            kinds = list(dict.fromkeys(global_layers))
            self.global_layer = kinds[0] if len(kinds) == 1 else (global_layers or None)
        elif set(kinds) != set(global_layers):
            raise ValueError(
                f"global_layer = {self.global_layer!r} contradicts layer_types, whose global layers are "
                f"{sorted(set(global_layers))}; give one of the two"
            )

    def _pattern(self) -> list[str]:
        interval = self.global_layer_interval
        count = self.num_hidden_layers // interval
        kinds = [self.global_layer] if isinstance(self.global_layer, str) else list(self.global_layer or ())
        if len(kinds) > count:
            raise ValueError(
                f"global_layer = {self.global_layer!r} needs at least {len(kinds)} global layers, but num_hidden_layers"
                f" = {self.num_hidden_layers} with global_layer_interval = {interval} has {count}; add layers, lower "
                "global_layer_interval, or give layer_types"
            )
        return [
            kinds[(layer // interval) % len(kinds)] if layer % interval == interval - 1 else self.local_layer
            for layer in range(self.num_hidden_layers)
        ]

    def _derive_heads(self) -> None:
        width = self.hidden_size
        if self.head_dim is None:
            if self.num_attention_heads is not None:
                if width % self.num_attention_heads:
                    raise ValueError(
                        f"hidden_size = {width} must be divisible by num_attention_heads = {self.num_attention_heads}"
                    )
                self.head_dim = width // self.num_attention_heads
            else:
                self.head_dim = default_head_dim(width)
        if self.num_attention_heads is None:
            if width % self.head_dim:
                raise ValueError(f"hidden_size = {width} must be divisible by head_dim = {self.head_dim}")
            self.num_attention_heads = width // self.head_dim
        if self.num_attention_heads * self.head_dim != width:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} times head_dim = {self.head_dim} must be "
                f"hidden_size = {width}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim must be even (rotary embeddings turn pairs), got {self.head_dim} with hidden_size = {width}"
            )


def model_fields() -> dict[str, Field]:
    """Every field of a model by name: those of all models, then those of the layer types. The command line has them
    from here."""
    own = documented_fields(SDMConfig, inherited=False)
    return {field.name: field for field in own} | layer_fields()


def _attributes() -> str:
    """The fields as a section of the docstring, so that `help(SDMConfig)` shows them."""
    lines = []
    for field in model_fields().values():
        kind = field.type.__name__ if isinstance(field.type, type) else str(field.type).replace("typing.", "")
        entry = f"{field.name} ({kind}, default {field.default!r}): {field.doc}"
        lines.append(textwrap.fill(entry, 116, initial_indent=" " * 8, subsequent_indent=" " * 12))
    return "\n".join(lines)


SDMConfig.__doc__ = f"{(SDMConfig.__doc__ or '').rstrip()}\n\n    Attributes:\n{_attributes()}\n    "


def _nearest(name: str) -> str:
    close = nearest(name, model_fields(), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _check_layers(name: str, kinds: Sequence[str], choices: Sequence[str]) -> None:
    if not kinds:
        raise ValueError(f"{name} must not be empty; it takes {', '.join(choices)}")
    for kind in kinds:
        if kind not in choices:
            raise ValueError(f"{name} must be of {', '.join(choices)}, got {kind!r}")


def _to_file(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate the fields of a configuration into what config.json holds."""
    fields = {_LAYER_TYPES if name == "layer_types" else name: value for name, value in fields.items()}
    # A class of the user's own that is registered with transformers stays.
    return fields | {"auto_map": _AUTO_MAP | (fields.get("auto_map") or {})}


def _from_file(fields: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_to_file`. Files of earlier versions are as they are."""
    fields = {"layer_types" if name == _LAYER_TYPES else name: value for name, value in fields.items()}
    others = {
        name: place
        for name, place in (fields.pop("auto_map", None) or {}).items()
        # transformers may have put the name of the repository in front.
        if str(place).rpartition("--")[2] != _AUTO_MAP.get(name)
    }
    return fields | {"auto_map": others} if others else fields


def check_attention_implementation(fields: Mapping[str, Any]) -> None:
    """Refuse a config.json that names an attention kernel outside of the installed packages.

    transformers takes "owner/kernel" for a kernel on a hub, downloads it and runs it. The same happens to
    "flash_attention_2" where flash-attn is missing. This function is for the configuration of any model, and looks into
    nested configurations too; it needs no network.

    Args:
        fields: the content of config.json.

    Raises:
        ValueError: if `_attn_implementation` or `attn_implementation` names anything but an installed implementation.
    """
    builtin = ["eager", "sdpa", "flex_attention"]
    builtin += ["flash_attention_2"] if is_flash_attn_2_available() else []
    builtin += ["flash_attention_3"] if is_flash_attn_3_available() else []
    for name, value in fields.items():
        name = str(name)  # id2label has integers
        if name.endswith("attn_implementation") or "attn_implementation_" in name:
            # transformers takes a dictionary too, with an implementation for each nested configuration.
            for implementation in value.values() if isinstance(value, Mapping) else [value]:
                if implementation is not None and implementation not in builtin:
                    raise ValueError(
                        f"{name} must be one of {', '.join(builtin)}, got {implementation!r}: kernels are not taken "
                        "from a hub; remove the field"
                    )
        elif isinstance(value, Mapping):
            check_attention_implementation(value)


def _write_code(folder: str | PathLike[str]) -> None:
    """Put the file that `auto_map` names into a folder."""
    code = Path(__file__).with_name("remote_code.py")
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_bytes(Path(folder) / f"{_CODE}.py", code.read_bytes())
