"""What a layer type says about itself, its costs among it, and the registry that everybody asks.

The configuration asks for its fields, the model for the layer, the cache for what its state depends on, `cost` for
what it costs, the command line for all fields there are. To add a layer type, write a file like `token_shift.py` and
name it in `__init__.py`; from outside the package, call `register`.
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from sdm.errors import UserError, check_not_negative, check_one_of, check_positive, check_size
from sdm.models.fields import Field, documented_fields

if TYPE_CHECKING:
    from sdm.models.configuration import SDMConfig


# Far beyond any model, and small enough that what is counted out from them, layers and divisors, is soon done.
_LARGEST = {"num_hidden_layers": 10_000, "hidden_size": 2**20}
_LARGEST_OTHER = 2**40


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token.

    A multiply-add is two. Norms, activations, rotary embeddings and short convolutions are left out: they are below one
    percent.
    """

    projections: int  # products with weight matrices, MLP and output projection included
    memory: int = 0  # writing and reading a recurrent state
    addressing: int = 0  # choosing the slots to write and read
    attention: int = 0  # scores and weighted sums over cached keys and values

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.projections + self.memory + self.addressing + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.projections + other.projections,
            self.memory + other.memory,
            self.addressing + other.addressing,
            self.attention + other.attention,
        )


@dataclass(frozen=True)
class LayerCost:
    """One sequence layer, its MLP not included."""

    kind: str
    weights: int  # elements of the matrices that every token is multiplied with
    vectors: int  # other parameters: norms, decay rates, convolutions, biases
    table: int = 0  # elements of a learned table of which a token reads a few rows
    initial_state: int = 0  # elements of a learned initial state
    state: int = 0  # elements of the recurrent state
    convolution_state: int = 0  # elements that short convolutions and shifts keep
    cached_per_token: int = 0  # key and value elements that a token adds
    window: int | None = None  # how many tokens' keys and values are kept; None: all
    state_moved: int = 0  # elements of the recurrent state read and written per token
    memory_flops: int = 0
    addressing_flops: int = 0
    attention_flops_per_token: int = 0  # per token looked at

    @property
    def parameters(self) -> int:
        """Parameters of the layer, without a learned initial state."""
        return self.weights + self.vectors + self.table

    def cached_tokens(self, context: int) -> int:
        """Tokens whose keys and values are kept behind `context` tokens."""
        return context if self.window is None else min(context, self.window)

    def state_elements(self, context: int) -> int:
        """Everything that the layer keeps behind `context` tokens."""
        return self.state + self.convolution_state + self.cached_per_token * self.cached_tokens(context)

    def flops(self, context: int) -> Flops:
        """FLOPs of one token behind `context` tokens."""
        attention = self.attention_flops_per_token * self.cached_tokens(context + 1)
        return Flops(2 * self.weights, self.memory_flops, self.addressing_flops, attention)

    def state_elements_moved(self, context: int) -> int:
        """State elements read or written for one token: old keys and values are read, the new ones written."""
        kept = self.cached_tokens(context) + 1 if self.cached_per_token else 0
        return self.state_moved + 2 * self.convolution_state + self.cached_per_token * kept


@functools.cache
def selection_flops(side: int, count: int) -> int:
    """Comparisons and additions of a product-key selection, and the softmax over what it selects.

    Each half is looked at once; of its best, only the pairs (a, b) with (a + 1)(b + 1) <= count can be chosen.
    """
    best = min(count, side)
    pairs = sum(min(best, count // (a + 1)) for a in range(best))
    return 2 * side + 2 * pairs + 3 * count


class LayerType(abc.ABC):
    """A kind of sequence layer that a block may have."""

    name: str
    """What `SDMConfig.layer_types` calls it."""
    scope: Literal["local", "global"]
    """A local layer sees a few tokens back; a global one the whole stream."""
    fields: type
    """A dataclass of the fields that it adds to the configuration, with a line of documentation each. Types may share
    fields, by a common base."""
    state_fields: tuple[str, ...] = ()
    """The fields on which the shapes of its state depend, beside hidden_size."""
    free_fields: tuple[str, ...] = ()
    """The fields that change neither the meaning nor the numbers of a state."""
    ops: tuple[str, ...] = ()
    """The ops that it calls, which must have the backend of the configuration."""
    bounded_state: bool = True
    """Whether its state has a fixed size, so that streams of any length can carry it from step to step."""

    def derive(self, config: SDMConfig) -> None:  # noqa: B027, most types have something to do, not all
        """Check the type's fields by themselves and fill in those that are None. It is called for every model, also for
        one without such a layer; the defaults must pass."""

    def check(self, config: SDMConfig) -> None:  # noqa: B027
        """Raise unless a model of this configuration can have such a layer."""

    @abc.abstractmethod
    def build(self, config: SDMConfig) -> nn.Module:
        """A layer, as `sdm.layers.interface.SequenceLayer` describes it."""

    @abc.abstractmethod
    def cost(self, config: SDMConfig) -> LayerCost:
        """What one layer costs."""

    def reach(self, config: SDMConfig) -> int | None:
        """How many tokens before it a token sees through such a layer; None: the whole stream."""
        return None

    def initialize(self, layer: nn.Module, config: SDMConfig) -> None:  # noqa: B027
        """What is to be done to a layer whose modules are initialised."""


LAYER_TYPES: dict[str, LayerType] = {}


def register(kind: LayerType) -> LayerType:
    """Make a layer type known by its name. Models, costs, caches, runs and the command line can use it from now on."""
    if kind.scope not in ("local", "global"):
        raise ValueError(f"scope of layer type {kind.name!r} must be 'local' or 'global', got {kind.scope!r}")
    if kind.name in LAYER_TYPES:
        raise ValueError(f"there is a layer type {kind.name!r} already")
    known = layer_fields()
    for field in documented_fields(kind.fields):
        if known.get(field.name, field) != field:
            raise ValueError(f"field {field.name!r} of layer type {kind.name!r} has another meaning elsewhere")
    LAYER_TYPES[kind.name] = kind
    return kind


def local_reach(config: SDMConfig) -> int:
    """How many tokens before it a token sees through the layers that do not see the whole stream, stacked."""
    return sum(LAYER_TYPES[kind].reach(config) or 0 for kind in config.layer_types or ())


def layer_fields() -> dict[str, Field]:
    """The fields of all layer types, by name."""
    return {field.name: field for kind in LAYER_TYPES.values() for field in documented_fields(kind.fields)}


def layer_names(scope: str | None = None) -> tuple[str, ...]:
    """The names of the layer types of this scope, or of all."""
    return tuple(name for name, kind in LAYER_TYPES.items() if scope in (None, kind.scope))


def derived(size: int | None) -> int:
    """Return the value of a field that `SDMConfig.derive` has filled in."""
    if size is None:
        raise ValueError("the configuration has fields that are not derived yet; call config.derive()")
    return size


def check_sizes(config: SDMConfig, *names: str) -> None:
    """Raise a `UserError` unless these fields are positive integers or, where their type allows it, None."""
    for name in names:
        size = getattr(config, name)
        if size is None and config.takes_none(name):
            continue
        largest = _LARGEST.get(name, _LARGEST_OTHER)
        if isinstance(size, int) and size > largest:
            shown = size if size < 2**64 else f"a number of {size.bit_length()} bits"
            raise UserError(f"{name} must be at most {largest}, got {shown}")
        check_size(**{name: size})


def check_numbers(config: SDMConfig, *names: str, positive: bool = False) -> None:
    """Raise a `UserError` unless these fields are finite and not negative; or not zero either."""
    check = check_positive if positive else check_not_negative
    check(**{name: getattr(config, name) for name in names})


def check_choices(config: SDMConfig, **choices: tuple[str, ...]) -> None:
    """Raise a `UserError` unless each of these fields has one of its options."""
    for name, options in choices.items():
        check_one_of(options, **{name: getattr(config, name)})
