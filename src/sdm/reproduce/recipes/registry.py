"""Every recipe by its name on the command line.

The parameters of a recipe's function are options of the command; those after `*` are for programs alone, because the
command line sets what they decide by the configuration's own fields.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from textwrap import fill
from typing import Any

from sdm.data.mad import MADTask
from sdm.errors import TrainingError
from sdm.models.cost import LEVELS
from sdm.reproduce.recipes.code import plain_code, tiny_code, tiny_text
from sdm.reproduce.recipes.graft import graft
from sdm.reproduce.recipes.mini import mini
from sdm.reproduce.recipes.paper import ladder, long_context
from sdm.reproduce.recipes.tasks import facts, mad, mqar, needle, rebinding, recall, retrieval
from sdm.run.config import TrainConfig

Recipe = Callable[..., TrainConfig]

GROUPS: dict[str, dict[str, Recipe]] = {
    "Language models": {
        "tiny-code": tiny_code,
        "tiny-text": tiny_text,
        "plain-code": plain_code,
        "mini": mini,
        "ladder": ladder,
        "long-context": long_context,
        "graft": graft,
    },
    "Tasks": {
        "recall": recall,
        "rebinding": rebinding,
        "needle": needle,
        "retrieval": retrieval,
        "facts": facts,
        "mqar": mqar,
        "mad": mad,
    },
}
RECIPES: dict[str, Recipe] = {name: function for group in GROUPS.values() for name, function in group.items()}

# Names that stand for a recipe with parameters.
_LAYERS = {"gdn": "gdn", "mamba2": "mamba2", "attention": "full_attention"}
SHORT_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{name}-{layer}": (name, {"global_layer": _LAYERS[layer]})
        for name in ("recall", "rebinding", "needle", "mqar", "retrieval", "facts")
        for layer in ("gdn", "attention")
    },
    **{f"mad-{task}": ("mad", {"task": task}) for task in typing.get_args(MADTask)},
    **{f"ladder-{level}": ("ladder", {"level": level}) for level in LEVELS},
    **{
        f"ladder-{level}-{layer}": ("ladder", {"level": level, "global_layer": kind})
        for level in LEVELS
        for layer, kind in _LAYERS.items()
    },
}


def find(name: str) -> tuple[str, dict[str, Any]]:
    """The recipe that a name means, and its parameters that the name gives."""
    if name not in RECIPES and name not in SHORT_NAMES:
        raise TrainingError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    return SHORT_NAMES.get(name, (name, {}))


def recipe(name: str, **parameters: Any) -> TrainConfig:
    """The configuration of a recipe."""
    name, given = find(name)
    return RECIPES[name](**given | parameters)


def parameters(name: str) -> dict[str, tuple[Any, Any]]:
    """Annotation and default of each parameter of a recipe that the command line has an option for."""
    function = RECIPES[name]
    hints = typing.get_type_hints(function, include_extras=True)
    return {
        parameter.name: (hints[parameter.name], parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.KEYWORD_ONLY
    }


def describe(name: str) -> str:
    """The first line of a recipe's documentation."""
    return (RECIPES[find(name)[0]].__doc__ or "").strip().splitlines()[0]


def listing(width: int = 79) -> str:
    """All recipes with their parameters, and what each says of itself."""
    lines = []
    for title, group in GROUPS.items():
        lines.append(f"{title}:")
        for name in group:
            options = [f"--{option.replace('_', '-')}" for option in parameters(name)]
            lines += [f"  {' '.join([name, *options])}", _indented(describe(name), width)]
            for hint, _ in parameters(name).values():
                if typing.get_origin(hint) is typing.Literal:
                    lines.append(_indented(", ".join(typing.get_args(hint)), width))
        lines.append("")
    text = "A recipe and its parameters may be one name: ladder-8-gdn, recall-gdn, mqar-attention, mad-memorization."
    return "\n".join([*lines, fill(text, width)])


def _indented(text: str, width: int) -> str:
    return fill(text, width, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False)
