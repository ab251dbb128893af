"""The configuration of a hybrid model. A few sizes are enough; everything else follows from them."""

import difflib
import math
import warnings
from collections.abc import Sequence
from dataclasses import fields
from os import PathLike
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from sdm.models import config_file
from sdm.models.rope import check_rope
from sdm.ops.backends import BACKENDS

LOCAL_LAYERS = ("sliding_attention", "token_shift")
GLOBAL_LAYERS = ("sdm", "gdn", "mamba2", "full_attention")
LAYER_TYPES = (*LOCAL_LAYERS, *GLOBAL_LAYERS)

# What layer_types is derived from.
_PATTERN = {"num_hidden_layers", "global_layer", "global_layer_interval", "local_layer"}

# Far beyond any model, and small enough that what is counted out from them, layers and divisors, is soon done.
_LARGEST = {"num_hidden_layers": 10_000, "hidden_size": 2**20}
_LARGEST_OTHER = 2**40

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


@strict
class SDMConfig(PreTrainedConfig):
    """A stack of blocks, three of sliding-window attention to one global layer, each followed by a gated MLP.

    `SDMConfig(vocab_size=97, hidden_size=128, num_hidden_layers=4, global_layer="sdm")` is a working model. Fields that
    are None are derived and then hold the derived value. Values that cannot work raise an error naming the field.

    Args:
        vocab_size: tokens in the vocabulary.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        global_layer: what the global layers are: "sdm", "gdn", "mamba2" or "full_attention"; or a list that the global
            layers take in turn, starting anew at its end: ["full_attention", "sdm"] is the paper's mixed hybrid.
            Derived: "sdm".
        global_layer_interval: every how many blocks a global layer comes; the others are local. 1 makes every layer
            global.
        local_layer: what the other blocks are: "sliding_attention", or "token_shift" for very small models.
        layer_types: the layer of every block, instead of the pattern: a local or a global one.
        intermediate_size: hidden width of the MLP. Derived: 8/3 hidden_size, rounded up to intermediate_multiple.
        intermediate_multiple: see intermediate_size.
        num_attention_heads: heads of both kinds of attention, of GDN and of Mamba2. Derived: hidden_size / head_dim.
        head_dim: channels per head. Derived: the largest power of two up to 128 that leaves at least four heads.
        num_key_value_heads: key-value heads of full attention. Derived: half of num_attention_heads, or the nearest
            number that divides them.
        sliding_window: tokens that a local layer sees, the current one included.
        rope_parameters: {"rope_theta": base of the rotary embedding}; `rope_theta=...` is taken as well. With a
            "rope_type" of "linear", "yarn" or "llama3" and its keys, as in transformers, positions are stretched.
            {"full_attention": {...}, "sliding_attention": {...}} tells the two kinds of attention apart.
        max_position_embeddings: longest stream that the model accepts; None: no limit. No layer needs one.
        num_memory_heads: heads of an SDM layer. Fewer heads make a larger memory at the same cost.
        num_slots: slots per head, a perfect square. Derived: (hidden_size / (4 num_memory_heads))^2.
        num_writes: slots that a token writes, per head. Derived: 64, or all slots if there are fewer.
        num_reads: slots that a token reads, per head. Derived as num_writes.
        learned_initial_state: whether SDM starts from a learned memory instead of zeros.
        initial_state_std: its scale at initialisation.
        memory_update: "delta", or "slot" for the per-slot form.
        memory_weighting: "softmax" or "l2".
        memory_temperature: of that softmax.
        memory_output_gate: "sigmoid" or "silu".
        decay_per_write: weight the decay of each written slot by its share of the write.
        normalize_scores: RMS-normalise the scores that address the memory.
        query_batch_norm: batch-normalise the read scores.
        shift_keys: take the keys of SDM and GDN from the token before, an aid for very small models.
        tie_query_initialization: initialise W_q of SDM and GDN equal to W_k, another one.
        recurrent_key_dim: key channels per head of GDN, state channels of Mamba2. Derived: head_dim / 2.
        short_convolution: taps of GDN's and Mamba2's short convolutions; 0 leaves GDN's out.
        gdn_learned_initial_state: whether GDN starts from a learned state instead of zeros.
        hidden_act: activation of the MLP; "silu".
        rms_norm_eps: of every RMS norm.
        initializer_range: standard deviation of the weights at initialisation.
        loss_chunk_size: tokens whose logits are in memory together when a training step computes its loss. None
            computes them all at once and returns them.
        backend: backend of the ops, see `sdm.ops.available_backends()`.
        use_cache: whether a forward pass without gradients returns a cache.
        tie_word_embeddings: whether the output projection is the embedding.
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
    hidden_size: int = 768
    num_hidden_layers: int = 11
    global_layer: str | list[str] | None = None
    global_layer_interval: int = 4
    local_layer: str = "sliding_attention"
    layer_types: list[str] | None = None
    intermediate_size: int | None = None
    intermediate_multiple: int = 64
    num_attention_heads: int | None = None
    head_dim: int | None = None
    num_key_value_heads: int | None = None
    sliding_window: int = 128
    rope_parameters: dict | None = None
    max_position_embeddings: int | None = 2**20
    num_memory_heads: int = 1
    num_slots: int | None = None
    num_writes: int | None = None
    num_reads: int | None = None
    learned_initial_state: bool = True
    initial_state_std: float | int = 0.002
    memory_update: str = "delta"
    memory_weighting: str = "softmax"
    memory_temperature: float | int = 1.0
    memory_output_gate: str = "sigmoid"
    decay_per_write: bool = False
    normalize_scores: bool = False
    query_batch_norm: bool = False
    shift_keys: bool = False
    tie_query_initialization: bool = False
    recurrent_key_dim: int | None = None
    short_convolution: int = 4
    gdn_learned_initial_state: bool = False
    hidden_act: str = "silu"
    rms_norm_eps: float | int = 1e-6
    initializer_range: float | int = 0.02
    loss_chunk_size: int | None = 1024
    backend: str = "auto"
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # What config.json holds is taken as it is: `SDMConfig(**config.to_diff_dict())`.
        kwargs = config_file.from_file(kwargs)
        self.layer_types = kwargs.pop("layer_types", self.layer_types)
        for name in self._unknown(kwargs):
            raise TypeError(f"SDMConfig has no field {name!r}{_nearest(name)}")
        self.derive()
        super().__post_init__(**kwargs)
        self.validate_rope()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration that a file holds; `kwargs` override its fields before anything is derived from them.

        A file may hold what this version does not know, and a user what he has set on a config. It is kept.
        """
        config_dict = config_file.from_file(config_dict)
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in SDMConfig.__annotations__}
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
        return cls.from_dict(cls._dict_from_json_file(json_file))

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        return config_file.to_file(super().to_diff_dict())

    def save_pretrained(self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        config_file.write_code(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """A saved folder names its code anyway. For a class of your own, it is as in transformers."""
        if cls is not SDMConfig:
            super().register_for_auto_class(auto_class)

    def derive(self) -> None:
        """Check the fields and fill in those that are None. A model does it again, for fields that were set since."""
        self._check_sizes()
        self._derive_layers()
        self._derive_heads()
        self._derive_memory()
        if self.intermediate_size is None:
            multiple = self.intermediate_multiple
            self.intermediate_size = math.ceil(8 * self.hidden_size / (3 * multiple)) * multiple
        if "mamba2" in (self.layer_types or ()) and not self.short_convolution:
            raise ValueError("short_convolution must be at least 1 for mamba2, got 0")

    def validate_layer_type(self) -> None:
        """transformers knows a fixed list of layer types; ours are checked when they are derived."""

    def validate_rope(self) -> None:
        """transformers warns of what cannot work; here it raises."""
        check_rope(self)

    @classmethod
    def _unknown(cls, values: dict[str, Any]) -> list[str]:
        known = _TRANSFORMERS_KEYS | set(GenerationConfig._get_default_generation_params())
        known |= {field.name for field in fields(cls)}
        return [name for name in values if name not in known and not name.startswith("_")]

    def _check_sizes(self) -> None:
        required = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "global_layer_interval",
            "intermediate_multiple",
            "sliding_window",
            "num_memory_heads",
        )
        derived = (
            "intermediate_size",
            "num_attention_heads",
            "head_dim",
            "num_key_value_heads",
            "max_position_embeddings",
            "num_slots",
            "num_writes",
            "num_reads",
            "recurrent_key_dim",
            "loss_chunk_size",
        )
        for name in required + derived:
            size = getattr(self, name)
            if size is None and name in derived:
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be a positive integer, got {size!r}")
            largest = _LARGEST.get(name, _LARGEST_OTHER)
            if size > largest:
                shown = size if size < 2**64 else f"a number of {size.bit_length()} bits"
                raise ValueError(f"{name} must be at most {largest}, got {shown}")
        if not isinstance(self.short_convolution, int) or self.short_convolution < 0:
            raise ValueError(f"short_convolution must be a number of taps, or 0, got {self.short_convolution!r}")
        for name in ("initializer_range", "initial_state_std"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {getattr(self, name)}")
        for name in ("rms_norm_eps", "memory_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)}")
        choices = {
            "local_layer": LOCAL_LAYERS,
            "memory_update": ("delta", "slot"),
            "memory_weighting": ("softmax", "l2"),
            "memory_output_gate": ("sigmoid", "silu"),
            "hidden_act": ("silu",),
            "backend": ("auto", *BACKENDS),
        }
        for name, options in choices.items():
            if getattr(self, name) not in options:
                raise ValueError(f"{name} must be one of {options}, got {getattr(self, name)!r}")

    def _derive_layers(self) -> None:
        if self.global_layer is not None:
            kinds = [self.global_layer] if isinstance(self.global_layer, str) else list(self.global_layer)
            _check_layers("global_layer", kinds, GLOBAL_LAYERS)
        if self.layer_types is None:
            self.global_layer = self.global_layer or "sdm"
            self.layer_types = self._pattern()
            return
        _check_layers("layer_types", self.layer_types, LAYER_TYPES)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, but num_hidden_layers = {self.num_hidden_layers}"
            )
        found = [kind for kind in self.layer_types if kind not in LOCAL_LAYERS]
        if self.global_layer is None:
            kinds = list(dict.fromkeys(found))
            self.global_layer = kinds[0] if len(kinds) == 1 else (found or None)
        elif set(kinds) != set(found):
            raise ValueError(
                f"global_layer = {self.global_layer!r} contradicts layer_types, whose global layers are "
                f"{sorted(set(found))}; give one of the two"
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
                sizes = [size for size in (128, 64, 32, 16, 8, 4, 2) if width % size == 0]
                if not sizes:
                    raise ValueError(f"hidden_size must be even (rotary embeddings turn pairs), got {width}")
                self.head_dim = next((size for size in sizes if width // size >= 4), sizes[-1])
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
            raise ValueError(f"head_dim must be even (rotary embeddings turn pairs), got {self.head_dim}")
        heads = self.num_attention_heads
        if self.num_key_value_heads is None:
            divisors = [count for count in range(1, heads + 1) if heads % count == 0]
            self.num_key_value_heads = min(divisors, key=lambda count: abs(2 * count - heads))
        elif heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {heads} must be divisible by num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.recurrent_key_dim is None:
            self.recurrent_key_dim = self.head_dim // 2

    def _derive_memory(self) -> None:
        heads = self.num_memory_heads
        if self.hidden_size % heads:
            raise ValueError(f"hidden_size = {self.hidden_size} must be divisible by num_memory_heads = {heads}")
        if self.num_slots is None:
            self.num_slots = max(1, self.hidden_size // (4 * heads)) ** 2
        side = math.isqrt(self.num_slots)
        if side * side != self.num_slots:
            raise ValueError(
                f"num_slots must be a perfect square (product keys), got {self.num_slots}; the nearest are {side**2} "
                f"and {(side + 1) ** 2}"
            )
        for name in ("num_writes", "num_reads"):
            count = getattr(self, name)
            if count is None:
                setattr(self, name, min(64, self.num_slots))
            elif count > self.num_slots:
                raise ValueError(f"{name} = {count} exceeds num_slots = {self.num_slots}; lower it or add slots")


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, [field.name for field in fields(SDMConfig)], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _check_layers(name: str, kinds: Sequence[str], choices: Sequence[str]) -> None:
    if not kinds:
        raise ValueError(f"{name} must not be empty; it takes {', '.join(choices)}")
    for kind in kinds:
        if kind not in choices:
            raise ValueError(f"{name} must be of {', '.join(choices)}, got {kind!r}")
