"""vLLM's list of free blocks, with the order of reuse decided when blocks are taken.

vLLM's queue hands out un-hashed blocks first as far as they stand in front, then the
least recently freed ones.  Ordering ahead of time can only guess what the next step
takes; here the blocks in front are put right at the moment vLLM takes them, when the
hits of the request that needs them are referenced already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from elora_connector.integration.vllm.gpu_table import BlockTable
from elora_connector.integration.vllm.patching import wrap

_QUEUE = "elora_queue"


class Order(Protocol):
    """Decides which free blocks stand in front."""

    def need(self, count: int) -> None:
        """vLLM is about to take the first `count` blocks of the list."""
        ...

    def freed(self, block_ids: Sequence[int]) -> None:
        """Cached blocks became free."""
        ...

    def freed_late(self) -> None:
        """Some of them stand before blocks that were freed earlier."""
        ...


class OrderedQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """The same list; keeps a `BlockTable` up to date and asks `Order` before a take.

    Un-hashed blocks always form the head of the list.
    """

    blocks: list[Any]
    table: BlockTable
    order: Order

    def popleft(self) -> Any:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        if n == 0:
            return []
        self.order.need(n)
        blocks = super().popleft_n(n)
        taken = self.table.taken
        for block in blocks:
            taken(block.block_id)
        return blocks

    def remove(self, block: Any) -> None:
        super().remove(block)
        self.table.taken(block.block_id)

    def append(self, block: Any) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        if not blocks:
            return
        ids = [block.block_id for block in blocks]
        late = self.table.late(ids)
        if late:
            by_id = dict(zip(ids, blocks, strict=True))
            apart = [by_id.pop(block_id) for block_id in late]
            ids, blocks = list(by_id), list(by_id.values())
        super().append_n(blocks)
        self.table.freed(ids)
        for block in apart if late else ():
            self._insert(block, self.table.freed_under(block.block_id))
        if late:
            self.order.freed_late()
        self.order.freed([*ids, *late])

    def _insert(self, block: Any, parent_id: int) -> None:
        """Before its parent, as if both had been freed together."""
        after = self.blocks[parent_id]
        before = after.prev_free_block
        before.next_free_block = after.prev_free_block = block
        block.prev_free_block, block.next_free_block = before, after
        self.num_free_blocks += 1

    def prepend_n(self, blocks: list[Any]) -> None:
        super().prepend_n(blocks)
        self.table.emptied(block.block_id for block in blocks)

    def put_in_front(self, blocks: Sequence[Any]) -> None:
        """Move free cached blocks right behind the un-hashed ones, in this order."""
        for block in blocks:
            super().remove(block)
        before = self.fake_free_list_head
        for _ in range(self.table.empty):
            before = before.next_free_block
        after = before.next_free_block
        for block in blocks:
            before.next_free_block = block
            block.prev_free_block = before
            before = block
        before.next_free_block = after
        after.prev_free_block = before
        self.num_free_blocks += len(blocks)

    def unhashed(self, blocks: Sequence[Any]) -> None:
        """Free blocks that lost their hash where they stood: to the head with them."""
        for block in blocks:
            self.remove(block)
        self.prepend_n(list(blocks))


def watch(pool: Any, table: BlockTable, order: Order) -> OrderedQueue:
    """Let `order` decide what `pool` reuses first, from now on."""
    wrap(BlockPool, "evict_blocks", _evict_blocks)
    queue = pool.free_block_queue
    queue.__class__ = OrderedQueue
    queue.blocks, queue.table, queue.order = pool.blocks, table, order
    setattr(pool, _QUEUE, queue)
    empty = [b for b in pool.blocks if not (b.ref_cnt or b.is_null) and b.block_hash is None]
    for block in empty:
        FreeKVCacheBlockQueue.remove(queue, block)
    FreeKVCacheBlockQueue.prepend_n(queue, empty)
    table.load(pool.blocks)
    assert isinstance(queue, OrderedQueue)
    return queue


def _evict_blocks(original: Any, pool: Any, block_ids: set[int]) -> Any:
    """vLLM un-hashes free blocks in place, which would leave holes deep in the list."""
    queue = getattr(pool, _QUEUE, None)
    if queue is None:
        return original(pool, block_ids)
    blocks = pool.blocks
    hashed = [blocks[b] for b in block_ids if blocks[b].block_hash is not None]
    result = original(pool, block_ids)
    queue.unhashed([b for b in hashed if b.ref_cnt == 0 and not b.is_null])
    return result
