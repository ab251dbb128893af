"""Which sequences may run: each holds blocks of vLLM's that stand for rows of the pool of states.

vLLM's pages have one size for all layers, so a large table as a page would force attention blocks of thousands of
tokens. A page therefore holds a handle of four bytes, and the states are in `StatePool`. The worker is not told which
blocks are freed; the manager hands out the same few blocks again and again, so that a block keeps its row for ever.

With prefix caching and as long as a row is idle, a sequence leaves its state behind in the last block that is full, for
others to continue, and goes on in another row. Elsewhere its table of blocks has the null block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclasses.dataclass(frozen=True, kw_only=True)
class SDMSpec(MambaSpec):
    """A state of fixed size in a pool of `num_rows` rows."""

    num_rows: int = 1

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of vLLM's pages that a sequence needs at least."""
        return self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Return the length of a sequence's block table."""
        return cdiv(max_len, self.block_size)


class SDMManager(MambaManager):
    """Gives sequences rows out of `num_rows`, and has the scheduler wait while all of them are in use."""

    def __init__(self, kv_cache_spec: SDMSpec, block_pool: BlockPool, **options: object) -> None:
        super().__init__(kv_cache_spec, block_pool, **options)
        self.mamba_cache_mode = "none"  # what vLLM does for "align" is done here in another way
        # They are never given back: a block is idle when nobody but the manager refers to it.
        self._blocks = list(block_pool.get_new_blocks(kv_cache_spec.num_rows))  # least recently used first
        self._ends: dict[str, int] = {}  # tokens that the last block of a running sequence has the state of

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: object,
        **options: object,
    ) -> int:
        """Return 0 when the sequence has a row or can have one; otherwise more blocks than there are: wait."""
        wait = self.block_pool.num_gpu_blocks + 1
        hit = new_computed_blocks[-1] if new_computed_blocks else None
        if hit is not None and hit.block_hash in self.cached_blocks_this_step:
            return wait  # its state is computed in this step
        blocks = self.req_to_blocks.get(request_id) or new_computed_blocks
        if request_id in self._ends and (self._place(num_tokens) < len(blocks) or self._movable(blocks[-1])):
            return 0
        return 0 if any(block is not hit for block in self._idle()) else wait

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, *args: object, **options: object
    ) -> list[KVCacheBlock]:
        """Give the sequence a row for its state behind `num_tokens` tokens, and an idle one for the state to keep."""
        blocks, place = self.req_to_blocks[request_id], self._place(num_tokens)
        known, own = len(blocks), request_id in self._ends
        before, self._ends[request_id] = self._ends.get(request_id, 0), num_tokens
        if own and place < known:
            return []
        # Other sequences can continue states at multiples of the scheduler's block size.
        unit, idle = self.scheduler_block_size, len(self._idle()) if self.enable_caching else 0
        kept = (num_tokens - 1) // unit * unit // self.block_size - 1
        useful = kept == known - 1 or (before == known * self.block_size and before % unit == 0)
        mover = None
        if own and not (idle and useful):
            mover, blocks[-1] = blocks[-1], self._null_block  # it goes on in its row
            self.block_pool._maybe_evict_cached_block(mover)
        blocks += [self._null_block] * (place - known)
        if known <= kept < place and idle > (mover is None):
            blocks[kept] = self._take()
        blocks.append(self._take() if mover is None else mover)
        return blocks[known:]

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int, *args: object) -> None:
        """Let go of the states before the one behind the processed tokens."""
        blocks = self.req_to_blocks.get(request_id, [])
        for place in range(min(len(blocks), max(0, self._place(processed_computed_tokens)))):
            self._release(blocks[place])
            blocks[place] = self._null_block

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Take the blocks back; vLLM's own pool never gets them."""
        self._ends.pop(request_id, None)
        for block in super().pop_blocks_for_free(request_id):
            self._release(block)
        return []

    def _place(self, tokens: int) -> int:
        """Where in a table the state behind so many tokens is."""
        return cdiv(tokens, self.block_size) - 1

    def _idle(self) -> list[KVCacheBlock]:
        return [block for block in self._blocks if block.ref_cnt == 1]

    def _movable(self, block: KVCacheBlock) -> bool:
        return block.ref_cnt == 2  # no other sequence continues the state

    def _take(self) -> KVCacheBlock:
        """Return an idle block: the first one without a state of a prefix, otherwise the least recently used one.

        Sequences in neighbouring rows are stepped together.
        """
        idle = self._idle()
        free = [block for block in idle if block.block_hash is None]
        block = min(free, key=lambda block: block.block_id) if free else idle[0]
        self.block_pool._maybe_evict_cached_block(block)
        block.ref_cnt += 1
        return block

    def _release(self, block: KVCacheBlock) -> None:
        if not block.is_null:
            block.ref_cnt -= 1
            self._blocks.remove(block)
            self._blocks.append(block)


def register_spec() -> None:
    """Tell vLLM which manager serves the spec."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(SDMSpec, SDMManager, uniform_type_base_spec=MambaSpec)
