"""What vLLM's block pool really does, seen from outside: whose KV is where, what is reused.

Knows nothing of our block table: owners and parents are noted when vLLM registers
blocks, and every take is compared with what else was free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash


class GpuWatch:
    """Watches one BlockPool.

    Args:
        slotted: adapter names with a GPU slot; None watches without judging.

    Attributes:
        taken: blocks taken while un-hashed, dormant, valid.
        wrong: takes of a cached block while an un-hashed one was free, or of a valid one
            while a dormant one was.
        orphans: free blocks still cached whose parent was reused.
    """

    def __init__(self, pool: Any, slotted: Callable[[], Collection[str]]) -> None:
        self.pool = pool
        self.slotted = slotted
        self.name_of: dict[bytes, str] = {}
        self.children: dict[bytes, set[bytes]] = {}
        self.taken: Counter[str] = Counter()
        self.wrong = 0
        self.orphans = 0
        self._cache, pool.cache_full_blocks = pool.cache_full_blocks, self._cache_full_blocks
        self._take, pool.get_new_blocks = pool.get_new_blocks, self._get_new_blocks

    def detach(self) -> None:
        """Stop watching."""
        del self.pool.cache_full_blocks, self.pool.get_new_blocks

    def _cache_full_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        name = request.lora_request.lora_name if request.lora_request else ""
        before = None
        for one in request.block_hashes:
            self.name_of[one] = name
            if before is not None:
                self.children.setdefault(before, set()).add(one)
            before = one
        return self._cache(request, *args, **kwargs)

    def kind(self, block: Any) -> str:
        if block.block_hash is None:
            return "un-hashed"
        name = self.name_of[get_block_hash(block.block_hash)]
        return "valid" if not name or name in self.slotted() else "dormant"

    def _get_new_blocks(self, count: int) -> list[Any]:
        free = self.pool.free_block_queue.get_all_free_blocks()
        kinds = {block.block_id: self.kind(block) for block in free}
        hashes = {block.block_id: block.block_hash for block in free}
        blocks: list[Any] = self._take(count)
        left = Counter(kinds.values())
        for block in blocks:
            kind = kinds[block.block_id]
            left[kind] -= 1
            self.taken[kind] += 1
            self.wrong += kind != "un-hashed" and left["un-hashed"] > 0
            self.wrong += kind == "valid" and left["dormant"] > 0
        for block in blocks:
            self._look_for_orphans(hashes[block.block_id])
        return blocks

    def _look_for_orphans(self, gone: Any) -> None:
        if gone is None or self.cached(get_block_hash(gone)):
            return
        for child in self.children.get(get_block_hash(gone), ()):
            found = self.pool.get_cached_block(child, [0])
            # One that a store still reads cannot go first.
            self.orphans += found is not None and found[0].ref_cnt == 0

    def cached(self, one: bytes) -> bool:
        return self.pool.get_cached_block(one, [0]) is not None

    def owners(self) -> dict[int, str]:
        """Adapter name of every cached block."""
        return {
            block.block_id: self.name_of[get_block_hash(block.block_hash)]
            for block in self.pool.blocks
            if block.block_hash is not None
        }

    def misplaced(self) -> int:
        """Free dormant blocks that stand behind a valid one in vLLM's list."""
        kinds = [self.kind(block) for block in self.pool.free_block_queue.get_all_free_blocks()]
        if "valid" not in kinds:
            return 0
        return kinds[kinds.index("valid") :].count("dormant")

    def dormant(self) -> int:
        """Free cached blocks of adapters without a slot."""
        return sum(
            self.kind(block) == "dormant"
            for block in self.pool.free_block_queue.get_all_free_blocks()
        )
