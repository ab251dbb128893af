"""What a step of vLLM's engine tells the recurrent layers: whose tokens are where, and which state is theirs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor


@dataclasses.dataclass
class SDMMetadata:
    """The sequences of a step, in the order of their tokens."""

    starts: list[int]
    """[sequences + 1] offsets of their tokens."""
    fresh: list[bool]
    """Whether no token of the sequence is computed; so it is too for a request that was preempted."""
    blocks: list[int]
    """The block of vLLM's that stands for the sequence's state."""
    num_actual_tokens: int


class SDMMetadataBuilder(AttentionMetadataBuilder[SDMMetadata]):
    """Reads the metadata that all attention backends get."""

    reorder_batch_threshold = None
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # which vLLM declares abstract

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **_: Any,
    ) -> SDMMetadata:
        """Return the metadata of one step."""
        given = common_attn_metadata
        blocks = mamba_get_block_table_tensor(
            given.block_table_tensor,
            given.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )[:, 0]
        count = given.num_reqs
        starts = given.query_start_loc_cpu[: count + 1].tolist()
        lengths = given.seq_lens[:count].tolist()
        fresh = [n - (end - start) <= 0 for n, (start, end) in zip(lengths, itertools.pairwise(starts), strict=True)]
        return SDMMetadata(starts, fresh, blocks[:count].tolist(), given.num_actual_tokens)


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
