"""The model of a run: the fields of `sdm.SDMConfig`, as a command line can set them and a run's file keeps them.

They are kept apart from it because a run's configuration must stay as it was written: a derived size must follow when
another one is changed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro
from huggingface_hub.errors import StrictDataclassError

from sdm.errors import UserError
from sdm.models.configuration import SDMConfig, model_fields
from sdm.models.fields import Field
from sdm.models.layer_types import layer_names

# What a run decides by itself.
_NOT_OF_A_RUN = {"hidden_act", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"}
# The paper's choices at a size for a laptop; as many tokens as the data has.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": None,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "global_layer": "sdm",
}


class ModelConfig:
    """`ModelConfig(hidden_size=64, global_layer="gdn")`: a frozen dataclass of every field that a model may have.

    Which fields there are depends on the layer types that are registered, so that its class is made when it is called.
    """

    def __new__(cls, **fields: object) -> ModelConfig:
        return super().__new__(cls.dataclass() if cls is ModelConfig else cls)

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, **fields: object) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    @staticmethod
    def dataclass() -> type[ModelConfig]:
        """The class with the fields of today."""
        return _dataclass(tuple(model_fields().values()), layer_names("local"), layer_names("global"))

    @classmethod
    def of(cls, config: SDMConfig) -> ModelConfig:
        """The fields of a model that exists."""
        values = {field.name: getattr(config, field.name) for field in dataclasses.fields(cls.dataclass())}
        values |= {"global_layer": None, "layer_types": tuple(config.layer_types or ())}
        return cls(**values)

    def __post_init__(self) -> None:
        # Everything but the size of the vocabulary is known, so that a mistake shows before any data is opened.
        self.build(self.vocab_size or 256)

    def build(self, vocab_size: int, eos_token_id: int | None = None) -> SDMConfig:
        """The configuration of a model for data of `vocab_size` tokens."""
        if self.vocab_size is not None and self.vocab_size < vocab_size:
            raise UserError(
                f"model.vocab_size = {self.vocab_size} is smaller than the {vocab_size} tokens of the data: the "
                "tokenizer does not match the model; leave model.vocab_size out or take the model's own tokenizer"
            )
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
        fields["vocab_size"] = self.vocab_size or vocab_size
        if fields["layer_types"] is not None:
            fields["global_layer"] = None
        try:
            return SDMConfig(**fields, eos_token_id=eos_token_id, bos_token_id=eos_token_id)
        except (TypeError, ValueError, StrictDataclassError) as error:
            raise UserError(f"model: {error}") from error


@functools.cache
def _dataclass(fields: tuple[Field, ...], local: tuple[str, ...], global_: tuple[str, ...]) -> type[ModelConfig]:
    one_of: Any = Literal  # of names that are not known before
    layers: dict[str, Any] = {
        "vocab_size": int | None,
        "global_layer": one_of[global_] | tuple[one_of[global_], ...] | None,
        "local_layer": one_of[local],
        "layer_types": tuple[one_of[(*local, *global_)], ...] | None,
        "rope_parameters": dict[str, float | str] | None,
    }
    members = []
    for field in fields:
        if field.name in _NOT_OF_A_RUN:
            continue
        kind = layers.get(field.name, float if field.type == float | int else field.type)
        default = _DEFAULTS.get(field.name, field.default)
        members.append((field.name, Annotated[kind, tyro.conf.arg(help=field.doc)], default))
    made = dataclasses.make_dataclass("ModelConfig", members, bases=(ModelConfig,), frozen=True)
    made.__doc__ = "A hybrid model. The defaults are the paper's choices at a size for a laptop."
    return made
