"""Which layer stands for each name in `SDMConfig.layer_types`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from sdm.layers import (
    FullAttention,
    GatedDeltaNet,
    Mamba2,
    ShiftedKeys,
    SlidingWindowAttention,
    SparseDeltaMemory,
    TokenShift,
)
from sdm.models.configuration import SDMConfig
from sdm.models.rope import rope_of


def _sliding_attention(config: SDMConfig) -> nn.Module:
    return SlidingWindowAttention(
        config.hidden_size, config.num_attention_heads, config.sliding_window, rope=rope_of(config, "sliding_attention")
    )


def _token_shift(config: SDMConfig) -> nn.Module:
    return TokenShift(config.hidden_size)


def _full_attention(config: SDMConfig) -> nn.Module:
    return FullAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        rope=rope_of(config, "full_attention"),
    )


def _sdm(config: SDMConfig) -> nn.Module:
    assert config.num_writes is not None
    assert config.num_reads is not None
    layer = SparseDeltaMemory(
        config.hidden_size,
        config.num_memory_heads,
        config.num_slots,
        config.num_writes,
        config.num_reads,
        config.learned_initial_state,
        initial_state_std=config.initial_state_std,
        update=config.memory_update,
        weighting=config.memory_weighting,
        temperature=config.memory_temperature,
        decay_per_write=config.decay_per_write,
        normalize_scores=config.normalize_scores,
        query_batch_norm=config.query_batch_norm,
        output_gate=config.memory_output_gate,
        norm_eps=config.rms_norm_eps,
        backend=config.backend,
    )
    return ShiftedKeys(layer) if config.shift_keys else layer


def _gdn(config: SDMConfig) -> nn.Module:
    layer = GatedDeltaNet(
        config.hidden_size,
        config.num_attention_heads,
        config.recurrent_key_dim,
        config.gdn_learned_initial_state,
        conv_size=config.short_convolution,
        initial_state_std=config.initial_state_std,
        norm_eps=config.rms_norm_eps,
        backend=config.backend,
    )
    return ShiftedKeys(layer) if config.shift_keys else layer


def _mamba2(config: SDMConfig) -> nn.Module:
    return Mamba2(
        config.hidden_size,
        config.num_attention_heads,
        config.recurrent_key_dim,
        conv_size=config.short_convolution,
        norm_eps=config.rms_norm_eps,
        backend=config.backend,
    )


MIXERS: dict[str, Callable[[SDMConfig], nn.Module]] = {
    "sliding_attention": _sliding_attention,
    "token_shift": _token_shift,
    "full_attention": _full_attention,
    "sdm": _sdm,
    "gdn": _gdn,
    "mamba2": _mamba2,
}
