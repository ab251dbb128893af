"""Small causal LMs of transformers to graft memories onto."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import sdm

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
HEADS: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}


def llama(**options: Any) -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**HEADS, **options}))


def mistral() -> PreTrainedModel:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**HEADS, sliding_window=6))


def qwen3() -> PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**HEADS))


def gemma3() -> PreTrainedModel:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**HEADS, sliding_window=6, layer_types=kinds)
    return transformers.Gemma3ForCausalLM(config)


def gpt2() -> PreTrainedModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=128)
    )


def opt() -> PreTrainedModel:
    config = transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=128)
    return transformers.OPTForCausalLM(config)


def mixtral() -> PreTrainedModel:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**HEADS, num_local_experts=4, num_experts_per_tok=2)
    )


def mamba() -> PreTrainedModel:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, state_size=4)
    )


def qwen3_next() -> PreTrainedModel:
    config = transformers.Qwen3NextConfig(
        **HEADS,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return transformers.Qwen3NextForCausalLM(config)


def tokens(rows: int = 2, length: int = 18) -> Tensor:
    return torch.randint(3, 64, (rows, length))


def trained(model: PreTrainedModel, **options: Any) -> Any:
    """Graft a model, with memories that read something, as if they had been trained."""
    grafted: Any = sdm.graft(model.eval(), **{"layers": [0, 1], **options})
    for memory in grafted.memories().values():
        nn.init.normal_(getattr(memory, "layer", memory).out_proj.weight, std=0.5)
    return grafted
