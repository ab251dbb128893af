"""The model as vLLM runs it: attention through vLLM's paged keys and values, every other layer through `StatePool`.

A step has the tokens of all running sequences side by side, [tokens,hidden_size]. The layers are the library's own, so
a new layer type needs nothing here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.utils import maybe_prefix
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from sdm.integrations.vllm.pool import Span, StatePool, rows_within
from sdm.integrations.vllm.spec import SDMSpec
from sdm.layers import GatedMLP, SequenceLayer
from sdm.layers.attention import GatedAttention
from sdm.models import SDMConfig
from sdm.models.layer_types import LAYER_TYPES

logger = init_logger("vllm.plugins.sdm")  # vLLM shows its own loggers only

DEFAULT_STATE_GIB = 4.0
ROWS_PER_SEQUENCE = 4  # with prefix caching: states beyond those of the running sequences are of prefixes
_PAGE = 1 << 16  # without attention layers, pages of four bytes would make 10^8 blocks


class PagedAttention(nn.Module):
    """The library's projections, rotary positions and gate around vLLM's attention."""

    def __init__(self, layer: GatedAttention, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.layer = layer
        self.attn = Attention(
            layer.num_heads,
            layer.head_dim,
            layer.head_dim**-0.5,
            num_kv_heads=layer.num_kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=getattr(layer, "window", None),
            prefix=f"{prefix}.attn",
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Mix the tokens [tokens,hidden_size] at `positions` of their sequences."""
        layer = self.layer
        query, key, value = layer._project(x, positions)
        mixed = self.attn(query.flatten(-2), key.flatten(-2), value.flatten(-2))
        return layer._output(x, mixed.unflatten(-1, (layer.num_heads, layer.head_dim)))


class PooledMixer(nn.Module, MambaBase):
    """A layer with a state of fixed size, which is a row of a pool."""

    def __init__(self, layer: nn.Module, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.layer = cast(SequenceLayer, layer)
        self.prefix = prefix
        self.num_rows = 1  # set once the states of all layers are counted
        self.pool: StatePool | None = None
        self.kv_cache = (torch.tensor([]),)
        self._row_of_block: dict[int, int] = {}
        context = vllm_config.compilation_config.static_forward_context
        if prefix in context:
            raise ValueError(f"there is a layer {prefix!r} already")
        context[prefix] = self

    @property
    def mamba_type(self) -> Any:
        """The backend that makes the metadata."""
        return MambaAttentionBackendEnum["SDM"]

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """The handle in vLLM's page."""
        return ((1,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """The handle in vLLM's page."""
        return (torch.int32,)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> SDMSpec:
        """Ask vLLM for blocks that stand for the rows of the pool."""
        spec = super().get_kv_cache_spec(vllm_config)
        fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        fields["page_size_padded"] = fields["page_size_padded"] or _PAGE
        cache, longest = vllm_config.cache_config, vllm_config.model_config.max_model_len
        caching = cache.enable_prefix_caching
        fields["block_size"] = cache.block_size if caching else longest
        fields["mamba_cache_mode"] = "align" if caching else "none"  # blocks of tokens have hashes of their own
        return SDMSpec(**fields, num_rows=self.num_rows)

    def bind_kv_cache(self, kv_cache: object) -> None:
        """Allocate the pool, when vLLM has allocated its pages."""
        super().bind_kv_cache(kv_cache)
        self.pool = StatePool(self.layer, self.num_rows)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Mix the tokens [tokens,hidden_size] of this step's sequences."""
        metadata = get_forward_context().attn_metadata
        if metadata is None or self.pool is None:  # vLLM measures memory before there are sequences
            return x
        y = torch.zeros_like(x)
        for stage in metadata[self.prefix].stages:
            spans = [
                Span(span.start, span.end, self._row(span.row), None if span.source is None else self._row(span.source))
                for span in stage
            ]
            self.pool.mix(x, spans, y)
        return y

    def _row(self, block: int) -> int:
        row = self._row_of_block.setdefault(block, len(self._row_of_block))
        if row >= self.num_rows:
            raise RuntimeError(f"vLLM gave {self.prefix} block {block}, beyond the {self.num_rows} of its pool")
        return row


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: SDMConfig, kind: str, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        layer = LAYER_TYPES[kind].build(config)
        mixer = PagedAttention if isinstance(layer, GatedAttention) else PooledMixer
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = mixer(layer, vllm_config, f"{prefix}.mixer")  # type: ignore[arg-type]
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Run the block on tokens [tokens,hidden_size]."""
        x = x + self.mixer(self.mixer_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    """Embedding, blocks and final norm, with the names of `sdm.SDMModel`."""

    def __init__(self, config: SDMConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, kind, vllm_config, f"{prefix}.layers.{place}")
            for place, kind in enumerate(config.layer_types or ())
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class VllmForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """`sdm.SDMForCausalLM` for vLLM.

    `additional_config["sdm_state_gib"]` of the engine is the memory for states, in GiB; the number of sequences that
    it holds is logged, and further ones wait.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: SDMConfig = vllm_config.model_config.hf_config
        self.config = config
        self.model = Stack(config, vllm_config, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        vllm_config.cache_config.mamba_cache_mode = "none"  # so that the runner does not copy states
        self._share_out(vllm_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """The handle in vLLM's page."""
        return ((1,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """The handle in vLLM's page."""
        return (torch.int32,)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """The embeddings of tokens."""
        return self.model.embed_tokens(input_ids)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """The hidden states [tokens,hidden_size] of one step's tokens."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        x = inputs_embeds
        for block in self.model.layers:
            x = block(x, positions)
        return self.model.norm(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """The logits of hidden states."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the tensors of a saved folder, all of them.

        Raises:
            ValueError: a tensor is missing or unknown.
        """
        own = dict(self.named_parameters()) | dict(self.named_buffers())
        loaded = set()
        for name, weight in weights:
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            name = name.replace(".mixer.", ".mixer.layer.", 1)
            if name not in own:
                raise ValueError(f"the saved folder has a tensor {name!r} that its configuration does not have")
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], weight)
            loaded.add(name)
        missing = {name for name, _ in self.named_parameters()} - loaded
        if missing:
            raise ValueError(f"the saved folder lacks {', '.join(sorted(missing))}; save the model again")
        return loaded

    def _share_out(self, vllm_config: VllmConfig) -> None:
        """Decide how many sequences the memory for states holds."""
        mixers = [block.mixer for block in self.model.layers if isinstance(block.mixer, PooledMixer)]
        if not mixers:
            return
        gib = state_gib(vllm_config.additional_config)
        per_sequence = sum(mixer.layer.start_state(1).nbytes for mixer in mixers)
        most = vllm_config.scheduler_config.max_num_seqs
        if vllm_config.cache_config.enable_prefix_caching:
            most *= ROWS_PER_SEQUENCE
        rows = rows_within(int(gib * 2**30), per_sequence, most)
        for mixer in mixers:
            mixer.num_rows = rows
        logger.info(
            "states: %d sequences fit (%.3g MiB each, sdm_state_gib = %g, max_num_seqs = %d); others wait",
            rows,
            per_sequence / 2**20,
            gib,
            vllm_config.scheduler_config.max_num_seqs,
        )


def state_gib(additional_config: object) -> float:
    """Return the memory for states that the engine's `additional_config` gives, in GiB.

    Raises:
        ValueError: it is no positive number.
    """
    given = additional_config.get("sdm_state_gib", DEFAULT_STATE_GIB) if isinstance(additional_config, dict) else None
    if given is None:
        return DEFAULT_STATE_GIB
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < float("inf"):
        raise ValueError(f"sdm_state_gib in additional_config must be a positive number of GiB, got {given!r}")
    return float(given)
