"""Recipes: functions with typed parameters that return the full configuration of a run. `sdm train NAME` runs one.

`sdm.reproduce.recipes.registry` has them by name.
"""

from __future__ import annotations

from typing import Annotated

from typing_extensions import Doc

from sdm.models.layer_types import layer_names

GlobalLayer = Annotated[
    str, Doc(f"The global layer, which models are compared by: {', '.join(layer_names('global'))}.")
]
