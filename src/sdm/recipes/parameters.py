"""Parameters that several recipes have. The command line shows their documentation."""

from __future__ import annotations

from typing import Annotated

from typing_extensions import Doc

from sdm.training.model_config import LayerType

GlobalLayer = Annotated[LayerType, Doc("The global layer, which models are compared by.")]
