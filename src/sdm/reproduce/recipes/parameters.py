"""Parameters that several recipes have. The command line shows their documentation."""

from __future__ import annotations

from typing import Annotated

from typing_extensions import Doc

from sdm.models.layer_types import layer_names

GlobalLayer = Annotated[
    str, Doc(f"The global layer, which models are compared by: {', '.join(layer_names('global'))}.")
]
