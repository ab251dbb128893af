"""Grafted models in files: as a folder with everything, or the memories alone beside a base that is checked."""

from __future__ import annotations

import functools
import json
import secrets
import shutil
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sdm.errors import UserError
from sdm.files import DamagedFile, new_file, read_json, write_bytes, write_json
from sdm.layers.interface import without_weight_decay
from sdm.models.attention_window import WindowedAttention
from sdm.models.fingerprint import checksum
from sdm.models.graft import GraftConfig, GraftCost, blocks, from_json, graft, graft_cost, insert, to_json
from sdm.models.grafted_mixer import CACHE_NAMES, GraftedMemory, GraftedMixer, memory_cache
from sdm.models.grafted_state import GraftMark, new_cache, rewindable

CONFIG = "config.json"
CODE = "grafted_remote_code.py"
HEADER = "sdm_graft"
VERSION = 1
# In the place of a size that every config of transformers has: the class of the base refuses it, and says why.
_REFUSAL = "this folder holds a grafted model: load it with sdm.load_grafted(folder)"


class GraftedConfig(PreTrainedConfig):
    """What config.json of a grafted model holds: the base's configuration and class, and the graft."""

    model_type = "sdm_grafted"

    base: dict[str, Any] | None = None
    graft: dict[str, Any] | None = None
    vocab_size: str | int | None = None


if TYPE_CHECKING:
    _Base = PreTrainedModel  # comes behind `GraftedModel` among the bases of a grafted class
else:
    _Base = object


class GraftedModel(_Base):
    """What a causal LM can do beside its own methods once it is grafted. `sdm.graft` makes it a base of its class."""

    base_class: ClassVar[type[PreTrainedModel]]
    graft_config: ClassVar[GraftConfig]
    _sdm_trainable: set[str] | None = None

    @property
    def graft_cost(self) -> GraftCost:
        """Parameters, state and FLOPs of the memories, and those of the base to compare with."""
        return graft_cost(self, self.graft_config)

    def memories(self) -> dict[int, GraftedMemory]:
        """Return the memories by the index of their block."""
        return {module.block: module.memory for module in self.modules() if isinstance(module, GraftedMixer)}

    def prepare_cache(self, cache: Cache) -> Cache:
        """Add the state of the memories to an empty cache. Without this call, the first tokens do it."""
        places = len(blocks(self))
        for block in self.graft_config.layers:
            memory_cache(cache, block, places)
        return cache

    def new_cache(self) -> DynamicCache:
        """Return an empty cache, to be passed as past_key_values."""
        return new_cache(self)

    def mark(self, cache: DynamicCache) -> GraftMark:
        """Name the point of the stream where a cache is now, for `rewind`. What follows is recorded from here on.

        Layers with a window keep what leaves it until the next `rewind`.
        """
        if cache.get_seq_length() == 0:
            self.prepare_cache(cache)
        cache.activate_past_recording()
        return GraftMark(id(cache), cache.get_seq_length())

    def rewind(self, cache: DynamicCache, mark: GraftMark) -> None:
        """Go back to a mark: the tokens since were never seen.

        Raises:
            ValueError: the mark is of another cache or out of reach. The cache is unchanged.
        """
        tokens = cache.get_seq_length() - mark.length
        if mark.cache != id(cache) or tokens < 0:
            raise ValueError("this mark is of another cache, or of tokens that were taken back since")
        reason = rewindable(cache, tokens) if tokens else None
        if reason is not None:
            raise ValueError(f"cannot take back {tokens} tokens: {reason}; call mark before the tokens")
        cache.crop(-tokens)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters of the memories that an optimizer should not decay, as `layers.interface` says."""
        return {
            f"{path}.memory.{name}"
            for path, module in self.named_modules()
            if isinstance(module, GraftedMixer)
            for name in without_weight_decay(module.memory)
        }

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write a folder that `sdm.load_grafted` and `AutoModelForCausalLM.from_pretrained` read.

        The arguments are those of transformers. Without this package the folder cannot be loaded: no other class reads
        its config.json.
        """
        if kwargs.pop("push_to_hub", False):
            raise UserError("push_to_hub is not available for grafted models; save the folder and upload it yourself")
        if getattr(self, "_hf_peft_config_loaded", False):  # writes the adapter only
            super().save_pretrained(save_directory, *args, **kwargs)
            return
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".saving-{secrets.token_hex(4)}"
        try:
            super().save_pretrained(aside, *args, **kwargs)
            if (aside / CONFIG).is_file():  # this process writes
                self._describe(aside)
                _replace(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _describe(self, folder: Path) -> None:
        """Turn the folder of a base with additional weights into that of a grafted model."""
        base = read_json(folder / CONFIG)
        base["architectures"] = [self.base_class.__name__]
        module = CODE.removesuffix(".py")
        fields = {
            "architectures": ["GraftedForCausalLM"],
            "auto_map": {
                "AutoConfig": f"{module}.GraftedConfig",
                "AutoModelForCausalLM": f"{module}.GraftedForCausalLM",
            },
            # One level deeper than where transformers looks for the configuration of a part of a model: the class of
            # the base must not load the folder and leave the memories out.
            "base": {"config": base, "class": self.base_class.__name__},
            "graft": to_json(self.graft_config),
            "model_type": GraftedConfig.model_type,
            "vocab_size": _REFUSAL,
        }
        write_json(folder / CONFIG, fields)
        write_bytes(folder / CODE, Path(__file__).with_name(CODE).read_bytes())

    def save_graft(self, path: str | PathLike[str]) -> None:
        """Write the memories alone, with the fingerprint of the base that they belong to.

        `sdm.load_grafted(path, base=model)` puts them onto the same base again.

        Raises:
            UserError: the base is trained too, so that the memories alone are not the model.
        """
        trained = [name for name, x in base_parameters(self).items() if x.requires_grad]
        if trained:
            raise UserError(
                f"save_graft writes the memories only, but the base is trained too ({trained[0]} requires a gradient); "
                "write both with save_pretrained"
            )
        tensors = {
            f"{block}.{name}": x.detach().cpu().contiguous()
            for block, memory in self.memories().items()
            for name, x in memory.state_dict().items()
        }
        header = {"version": VERSION, "graft": to_json(self.graft_config), "base": base_fingerprint(self)}
        with new_file(Path(path)) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt", HEADER: json.dumps(header)})

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: object, **kwargs: object
    ) -> None:
        """Add the memories' state before assisted decoding asks the layers of the cache to record."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        for name in CACHE_NAMES:
            if model_kwargs.get(name) is not None:
                self.prepare_cache(model_kwargs[name])


@functools.cache
def grafted_class(base: type[PreTrainedModel], graft_config: GraftConfig) -> type[PreTrainedModel]:
    """Return the class of models of class `base` with such a graft. Constructing it grafts a new base."""

    def __init__(self: PreTrainedModel, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
        base.__init__(self, config, *args, **kwargs)
        insert(self, graft_config)

    fields = {
        "__init__": __init__,
        "base_class": base,
        "graft_config": graft_config,
        "__doc__": f"A grafted {base.__name__}.",
    }
    return type(f"Grafted{base.__name__}", (GraftedModel, base), {**fields, "__module__": __name__})


class GraftedForCausalLM:
    """What config.json names as the class of a grafted model: loading gives a model of its base's class, grafted."""

    config_class = GraftedConfig
    _auto_class: ClassVar[Any] = None

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Nothing to register: the folder has the code already."""

    @classmethod
    def from_pretrained(
        cls, folder: str | PathLike[str], *args: object, config: object = None, **kwargs: Any
    ) -> PreTrainedModel:
        """Load a grafted model from a folder; options as in transformers."""
        return load_grafted(folder, **kwargs)


class _Loadable(Protocol):
    """A class of models, as `_load_folder` loads one."""

    def from_pretrained(
        self, folder: Path, *, config: PreTrainedConfig, output_loading_info: bool, **options: object
    ) -> tuple[PreTrainedModel, dict[str, list[str]]]: ...


def load_grafted(path: str | PathLike[str], base: PreTrainedModel | None = None, **options: object) -> PreTrainedModel:
    """Load a grafted model.

    Args:
        path: a folder that `save_pretrained` of a grafted model wrote, or a file that `save_graft` wrote.
        base: for a file: the model that the memories belong to. It is grafted in place.
        options: for a folder: options of transformers' `from_pretrained`, such as dtype or attn_implementation.

    Raises:
        UserError: the files are damaged or of another kind, or the base is another one. A given base is unchanged.
    """
    place = Path(path)
    if place.is_dir():
        if base is not None:
            raise UserError(f"{place} is a folder with its own base; leave base out, or give a file of save_graft")
        return _load_folder(place, options)
    if base is None:
        what = "a file of save_graft, which needs base=model" if place.is_file() else "not there"
        raise UserError(f"path must be the folder of a grafted model; {place} is {what}")
    if options:
        raise UserError(f"options are for folders; the base is given as it is, so leave out {', '.join(options)}")
    return _load_file(place, base)


def _load_folder(folder: Path, options: dict[str, object]) -> Any:
    fields = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    described = fields.get("base") or {}
    base, name = described.get("config"), str(described.get("class"))
    if fields.get("model_type") != GraftedConfig.model_type or not isinstance(base, dict):
        raise UserError(f"{folder} does not hold a grafted model; AutoModelForCausalLM loads other models")
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or base.get("model_type") not in CONFIG_MAPPING:
        raise UserError(f"{folder / CONFIG}: this version of transformers has no base class {name!r}; update it")
    if options.get("quantization_config") is not None:
        raise UserError("quantization_config is not available for grafted models: the memories need their weights")
    config = from_json(fields.get("graft") or {}, str(folder / CONFIG))
    kind = cast(_Loadable, grafted_class(getattr(transformers, name), config))
    wanted = options.pop("output_loading_info", False)
    options = {"use_safetensors": True, **options}
    base_config = CONFIG_MAPPING[base["model_type"]].from_dict(base)
    model, info = kind.from_pretrained(folder, config=base_config, output_loading_info=True, **options)
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(fault):
            names = ", ".join(sorted(map(str, info[fault]))[:5])
            raise UserError(f"the weights in {folder} do not fit {CONFIG}; {fault.replace('_', ' ')}: {names}")
    for parameter in base_parameters(model).values():
        parameter.requires_grad_(parameter.is_floating_point() and not config.freeze_base)
    return (model, info) if wanted else model


def _load_file(path: Path, base: PreTrainedModel) -> PreTrainedModel:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(HEADER, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    except Exception as error:
        raise DamagedFile(f"{path} is damaged or no file of save_graft: {error}") from error
    if header.get("version") != VERSION:
        raise UserError(f"{path} is no file of save_graft that this version reads (version {header.get('version')!r})")
    if not isinstance(base, PreTrainedModel) or isinstance(base, GraftedModel):
        raise UserError("base must be a causal LM of transformers that is not grafted yet")
    expected, given = header["base"], base_fingerprint(base)
    for name, value in expected.items():
        if given.get(name) != value:
            raise UserError(f"{path} was grafted onto another base: its {name} is {value!r}, got {given.get(name)!r}")
    config = from_json(header["graft"], str(path))
    _check_shapes(path, tensors, base, config)
    options = {name: value for name, value in vars(config).items() if name != "layers"}
    model = graft(base, config.layers, **options)
    assert isinstance(model, GraftedModel)
    for block, memory in model.memories().items():
        prefix = f"{block}."
        memory.load_state_dict({n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)})
    return model


def _check_shapes(path: Path, tensors: dict[str, Tensor], base: PreTrainedModel, config: GraftConfig) -> None:
    """Raise unless the tensors are those of the memories, before the base is changed."""
    from sdm.models.graft import build_memory, hidden_size

    with torch.device("meta"):
        memory = build_memory(hidden_size(base), config)
    expected = {f"{i}.{name}": x.shape for i in config.layers for name, x in memory.state_dict().items()}
    if {name: x.shape for name, x in tensors.items()} != expected:
        raise DamagedFile(f"{path} is damaged: its tensors are not those of the memories that it describes")


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the base by the names that they have without a graft."""
    wrapped = [path for path, x in model.named_modules() if isinstance(x, (GraftedMixer, WindowedAttention))]
    wrapped.sort(key=len, reverse=True)  # those within others first
    memories = tuple(f"{path}.memory." for path, x in model.named_modules() if isinstance(x, GraftedMixer))
    parameters = {}
    for full, x in model.named_parameters():
        if full.startswith(memories or ("\0",)):
            continue
        name = full
        for path in wrapped:
            if name.startswith(f"{path}.mixer."):
                name = path + name[len(f"{path}.mixer") :]
        parameters[name] = x
    return parameters


def base_fingerprint(model: nn.Module) -> dict[str, str]:
    """Return what identifies the base of a grafted model, or a model that is not grafted."""
    kind = getattr(type(model), "base_class", type(model))
    return {"class": kind.__name__, "weights": checksum({n: x.data for n, x in base_parameters(model).items()})}


def _replace(source: Path, folder: Path) -> None:
    """Move the files of a complete folder into another one; without config.json in between, nothing can be loaded."""
    (folder / CONFIG).unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    for file in sorted(source.iterdir(), key=lambda file: file.name == CONFIG):
        file.replace(folder / file.name)


def register_grafted() -> None:
    """Let transformers' Auto classes load grafted models without remote code."""
    AutoConfig.register(GraftedConfig.model_type, GraftedConfig)
    AutoModelForCausalLM.register(GraftedConfig, GraftedForCausalLM)
