"""What a step of vLLM's engine tells the recurrent layers: whose tokens are where, and which state is theirs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from sdm.integrations.vllm.pool import Span, spans_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclasses.dataclass
class SDMMetadata:
    """The tokens of a step; the rows of the spans are blocks of vLLM's. The second stage continues the first."""

    stages: tuple[list[Span], list[Span]]
    num_actual_tokens: int


class SDMMetadataBuilder(AttentionMetadataBuilder[SDMMetadata]):
    """Reads the metadata that all attention backends get."""

    reorder_batch_threshold = None
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # which vLLM declares abstract

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **_: object,
    ) -> SDMMetadata:
        """Return the metadata of one step."""
        given, size = common_attn_metadata, self.kv_cache_spec.block_size
        count = given.num_reqs
        starts = given.query_start_loc_cpu[: count + 1].tolist()
        lengths = given.seq_lens[:count].tolist()
        tables = given.block_table_tensor[:count].tolist()
        stages: tuple[list[Span], list[Span]] = ([], [])
        for (start, end), length, table in zip(itertools.pairwise(starts), lengths, tables, strict=True):
            for stage, span in zip(stages, spans_of(start, end, length, table, size), strict=False):
                stage.append(span)
        return SDMMetadata(stages, given.num_actual_tokens)


class SDMBackend(AttentionBackend):
    """Names the builder; there is no attention."""

    @staticmethod
    def get_name() -> str:
        """The name under which the backend is registered."""
        return "SDM"

    @staticmethod
    def get_builder_cls() -> type[SDMMetadataBuilder]:
        """The class that makes the metadata of a step."""
        return SDMMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """The state has a fixed size."""
        return True
