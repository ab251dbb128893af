"""Which sequences may run: each holds one block of vLLM's, which stands for a row of the pool of states.

vLLM's pages have one size for all layers, so a large table as a page would force attention blocks of thousands of
tokens. A page therefore holds a handle of four bytes, and the states are in `StatePool`. The worker is not told which
blocks are freed; the manager hands out the same few blocks again and again, so that a block keeps its row for ever.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclasses.dataclass(frozen=True, kw_only=True)
class SDMSpec(MambaSpec):
    """A state of fixed size in a pool of `num_rows` rows."""

    num_rows: int = 1


class SDMManager(MambaManager):
    """Gives each sequence one of `num_rows` blocks, and has the scheduler wait while all of them are in use."""

    def __init__(self, kv_cache_spec: SDMSpec, block_pool: Any, **options: Any) -> None:
        super().__init__(kv_cache_spec, block_pool, **options)
        blocks = block_pool.get_new_blocks(kv_cache_spec.num_rows)
        self._blocks = {block.block_id: block for block in blocks}
        # The lowest first: sequences in neighbouring rows are stepped together.
        self._idle = sorted(self._blocks)

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **options: Any) -> int:
        """Return 0 when the sequence has a row or can have one; otherwise more blocks than there are: wait."""
        if self.req_to_blocks.get(request_id) or self._idle:
            return 0
        return self.block_pool.num_gpu_blocks + 1

    def allocate_new_blocks(self, request_id: str, *args: Any, **options: Any) -> list[Any]:
        """Give the sequence its block, once."""
        blocks = self.req_to_blocks[request_id]
        if blocks:
            return []
        blocks.append(self._blocks[heapq.heappop(self._idle)])
        return list(blocks)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Take the block back; vLLM's own pool never gets it."""
        for block in super().pop_blocks_for_free(request_id):
            heapq.heappush(self._idle, block.block_id)
        return []


def register_spec() -> None:
    """Tell vLLM which manager serves the spec."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(SDMSpec, SDMManager, uniform_type_base_spec=MambaSpec)
