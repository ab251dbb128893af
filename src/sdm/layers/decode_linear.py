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
from sdm.layers.attention import KeyValueState
from sdm.layers.determinism import is_deterministic
from sdm.layers.huge_pages import move_to_huge_pages
from sdm.layers.interface import check_input
from sdm.layers.modules import Float32Linear, GatedMLP
from sdm.layers.rope import turns_per_position
from sdm.layers.sliding_window_attention import SlidingWindowAttention
from sdm.layers.state import Record
from sdm.ops.backends import goes_past_dispatcher
from sdm.ops.linear_rows import MISSING, Weights, gated_mlp_rows, linear_group, linear_rows, rms_norm_rows
from sdm.ops.window_step import window_step_

logger = logging.getLogger(__name__)

WEIGHTS = ("float32", "bfloat16", "int8")
MOST_ROWS = 16
"""With more rows than this, a matrix product is faster."""


def optimize_for_decoding(model: nn.Module, weights: str = "float32") -> nn.Module:
    """Make decoding on a CPU faster, in place: every `nn.Linear` becomes a `DecodeLinear`.

    RMS norms, gated MLPs and sliding-window attention of this library run a step in one to three calls of the compiled
    core, and a Sparse Delta Memory projects a token in one.

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
    move_to_huge_pages(model, [layer.weight for layer in layers.values()])
    for module in model.modules():
        module.__class__ = _DECODING.get(type(module), type(module))
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
        if _is_step(x):
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


def project_together(x: Tensor, *layers: nn.Module) -> Tensor | None:
    """Project the rows of a decode step by several layers in one call.

    Returns:
        The outputs side by side, [...,sum of the outputs]; None where they must be called one by one, because one of
        them is neither `DecodeLinear` nor `Float32Linear` or has a hook, or because x is not of a step.
    """
    if torch.compiler.is_compiling():  # a graph has the products one by one
        return None
    weights = [_weights_of(layer) for layer in layers]
    if not _is_step(x) or None in weights:
        return None
    return linear_group(x, weights)  # type: ignore[arg-type]


class DecodeMLP(GatedMLP):
    """A `GatedMLP` that runs a decode step in one call. Made by `optimize_for_decoding`."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to every token of x [..., hidden_size]."""
        weights = [_weights_of(self._modules[name]) for name in ("gate_proj", "up_proj", "down_proj")]
        if _is_step(x) and None not in weights:
            return gated_mlp_rows(x, *weights)  # type: ignore[arg-type]
        return super().forward(x)


class DecodeNorm(nn.RMSNorm):
    """An `nn.RMSNorm` that normalises the rows of a step in one call. Made by `optimize_for_decoding`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [...,size]."""
        weight = self._parameters["weight"]
        if weight is None or weight.dtype != x.dtype or len(self.normalized_shape) != 1 or not _is_step(x):
            return super().forward(x)
        return rms_norm_rows(x, weight, torch.finfo(x.dtype).eps if self.eps is None else self.eps)


class DecodeWindowAttention(SlidingWindowAttention):
    """A `SlidingWindowAttention` that runs a decode step in three calls. Made by `optimize_for_decoding`."""

    @torch.no_grad()
    def step_(self, x: Tensor, state: KeyValueState, record: Record | None = None) -> Tensor:
        """Decode one token: x [B,hidden_size] gives y of the same shape; `state` changes in place."""
        check_input(x, self.hidden_size, "[B,hidden_size]")
        self._check_state(state, x.shape[0], x.device)
        usual = record is None and state.key.dtype == state.value.dtype == x.dtype
        usual = usual and state.key.is_contiguous() and state.value.is_contiguous() and goes_past_dispatcher(state.key)
        layers = self.query_proj, self.key_proj, self.value_proj, self.gate_proj
        projected = project_together(x, *layers) if usual else None
        if projected is None:
            return super().step_(x, state, record)
        turns = turns_per_position(self.head_dim, self.rope)
        mixed = window_step_(projected, state.key, state.value, state.length, turns, self.rope.scale, self.num_heads)
        state.length += 1
        return self.out_proj(mixed)


_DECODING = {GatedMLP: DecodeMLP, nn.RMSNorm: DecodeNorm, SlidingWindowAttention: DecodeWindowAttention}


def _is_step(x: Tensor) -> bool:
    """Whether x has the few rows of a step, and nobody needs its gradients or the bits of `deterministic()`."""
    few = x.dtype == torch.float32 and x.numel() <= MOST_ROWS * x.shape[-1] and not MISSING
    return few and not torch.is_grad_enabled() and not is_deterministic() and goes_past_dispatcher(x)


def _weights_of(layer: nn.Module | None) -> Weights | None:
    """The weights of a layer whose `forward` may be left out."""
    if layer is None or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    # Looked up as `layer.weight` would look them up, which takes a third of the time of a small call.
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if weight is None:
        return None
    if type(layer) is DecodeLinear:
        return Weights(weight, bias, layer._buffers["scale"])
    if type(layer) is Float32Linear and weight.dtype == torch.float32:
        return Weights(weight, bias)
    return None


def _save_as_float32(layer: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: object) -> None:
    """Let a saved model have the numbers that reduced weights stand for."""
    assert isinstance(layer, DecodeLinear)
    state_dict[f"{prefix}weight"] = layer.weights().detach()
    state_dict.pop(f"{prefix}scale", None)
