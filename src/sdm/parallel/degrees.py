"""Which degrees of splitting a model allows, asked of its configuration."""

from __future__ import annotations

import torch
from torch import nn

from sdm.models import SDMConfig
from sdm.models.modeling import SDMBlock
from sdm.parallel.channels import check_channels
from sdm.parallel.context import check_context


def unsupported_reason(config: SDMConfig, context: int, channel: int) -> str | None:
    """Why a model cannot be split over so many ranks along time and along channels, in words; None if it can."""
    kinds = config.layer_types or []
    with torch.device("meta"):  # one layer of each type says it for all
        mixers = [SDMBlock(config, kinds.index(kind)).mixer for kind in dict.fromkeys(kinds)]
    model = nn.ModuleDict({str(place): nn.ModuleDict({"mixer": mixer}) for place, mixer in enumerate(mixers)})
    try:
        if channel > 1:
            check_channels(model, channel)
        if context > 1:
            check_context(model, context, channel)
    except ValueError as error:
        return str(error)
    return None
