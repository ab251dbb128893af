"""Linear layers for decoding on CPUs: a step reads every weight once, and takes as long as reading them.

Matrix libraries are made for many rows. For the one row of a stream, or the few of a batch, the compiled core reads
weights at the speed of memory, and as bfloat16 or int8 there is less to read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_one_of
from sdm.layers.determinism import is_deterministic
from sdm.ops.backends import goes_past_dispatcher
from sdm.ops.linear_rows import MISSING, linear_rows

logger = logging.getLogger(__name__)

WEIGHTS = ("float32", "bfloat16", "int8")
MOST_ROWS = 16
"""With more rows than this, a matrix product is faster."""


def optimize_for_decoding(model: nn.Module, weights: str = "float32") -> nn.Module:
    """Make decoding on a CPU faster, in place: every `nn.Linear` becomes a `DecodeLinear`.

        model = sdm.optimize_for_decoding(SDMForCausalLM.from_pretrained(folder), weights="int8")

    Works for any model of float32 `nn.Linear` layers, those of transformers included. It can be saved: reduced weights
    are written as the float32 numbers that they stand for; a tied output projection is
    the embedding again.

    Args:
        model: in float32, on a CPU.
        weights: "float32" keeps them; "bfloat16" and "int8" round those of linear layers, so that there is a half or a
            quarter to read. Embeddings, gates, norms and memories stay as they are. docs/performance.md has the effect.

    Returns:
        The same model.

    Raises:
        ValueError: `weights` is not one of these, a layer was reduced before, or the model is in another dtype or on
            another device. Nothing is changed then.
    """
    check_one_of(WEIGHTS, weights=weights)
    layers = {name: module for name, module in model.named_modules() if type(module) in (nn.Linear, DecodeLinear)}
    for name, layer in layers.items():
        weight = layer.weight
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise ValueError(
                f"model must be in float32 on a CPU, but {name}.weight is {weight.dtype} on {weight.device}; "
                "call this on a model as it was loaded, after model.float()"
            )
    if MISSING:
        logger.warning("optimize_for_decoding brings no speed here: %s", MISSING)
    for layer in layers.values():
        layer.__class__ = DecodeLinear
        layer._reduce(weights)
    return model


class DecodeLinear(nn.Linear):
    """An `nn.Linear` that reads its weights at the speed of memory when there are few rows and no gradients.

    The bits of a row do not depend on the rows beside it as long as there are at most `MOST_ROWS`. Made by
    `optimize_for_decoding`.
    """

    scale: Tensor | None
    """Of int8 weights, [out_features]; otherwise None."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [...,in_features]."""
        few = x.dtype == torch.float32 and x.numel() <= MOST_ROWS * self.in_features and not MISSING
        if few and not is_deterministic() and not torch.is_grad_enabled() and goes_past_dispatcher(x):
            return linear_rows(x, self.weight, self.bias, self.scale)
        return F.linear(x, self.weights().to(x.dtype), self.bias)

    def weights(self) -> Tensor:
        """Return the weights [out_features,in_features] in float32."""
        weight = self.weight.float()
        return weight if self.scale is None else weight * self.scale.unsqueeze(1)

    @torch.no_grad()
    def _reduce(self, weights: str) -> None:
        self.register_buffer("scale", None)
        if weights == "float32":
            return
        weight = self.weight.to(torch.bfloat16)
        if weights == "int8":
            # A row of zeros has any scale.
            self.scale = (self.weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            weight = (self.weight / self.scale.unsqueeze(1)).round_().to(torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_state_dict_post_hook(_save_as_float32)

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], *args: Any) -> None:
        if self.weight.dtype != torch.float32:
            raise RuntimeError(
                f"weights cannot be loaded into {self.weight.dtype}: load them, then optimize_for_decoding"
            )
        super()._load_from_state_dict(state_dict, *args)


def _save_as_float32(layer: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: object) -> None:
    """Let a saved model have the numbers that reduced weights stand for."""
    assert isinstance(layer, DecodeLinear)
    state_dict[f"{prefix}weight"] = layer.weights().detach()
    state_dict.pop(f"{prefix}scale", None)
