"""I7 and the per-block view, checked against vLLM's own objects; linear in the pool.

For `elora.check_invariants` and tests.  What is compared is recomputed from blocks and
their hashes; of our own state only the owner of a block is believed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from elora_connector.errors import InvariantError
from elora_connector.integration.vllm.gpu_order import BlockOrder
from elora_connector.integration.vllm.gpu_table import CACHED, EMPTY, READY, USED, BlockTable

_UNHASHED, _DORMANT, _VALID = range(3)
_KINDS = ("un-hashed", "dormant", "valid")


def check_order(
    pool: Any, table: BlockTable, names: Sequence[str], slotted: Collection[str], count: int
) -> None:
    """The first `count` free blocks are un-hashed, then dormant, then valid ones (I7).

    Args:
        names: adapter name of each owner index, empty for the base model.
        slotted: names with a GPU slot in the ledger's account.

    Raises:
        InvariantError: vLLM would reuse a block while a worse one is free.
    """

    def kind(block: Any) -> int:
        if block.block_hash is None:
            return _UNHASHED
        name = names[table.owner[block.block_id]]
        return _VALID if not name or name in slotted else _DORMANT

    kinds = [kind(block) for block in pool.free_block_queue.get_all_free_blocks()]
    for place, (found, wanted) in enumerate(zip(kinds[:count], sorted(kinds)[:count], strict=True)):
        if found != wanted:
            raise InvariantError(
                f"I7: free block {place} of {count} is {_KINDS[found]} while "
                f"{kinds.count(wanted)} {_KINDS[wanted]} ones are free"
            )


def check_dormant(pool: Any, order: BlockOrder, count: int) -> None:
    """Dormant blocks among the first `count` stand in the order in which they were freed."""
    table = order.table
    blocks = pool.free_block_queue.get_all_free_blocks()[:count]
    ids = [block.block_id for block in blocks if block.block_hash is not None]
    away = order.dormant(np.array(ids, dtype=np.int64))
    stamps = [int(table.stamp[b]) for b, dormant in zip(ids, away, strict=True) if dormant]
    if stamps != sorted(stamps):
        raise InvariantError("I7: dormant blocks are out of their queue order")


def check_table(pool: Any, order: BlockOrder) -> None:
    """The table says of every block what vLLM says.

    Raises:
        InvariantError: they differ.
    """
    table = order.table
    for block in pool.blocks:
        state = table.marks[block.block_id]
        if block.ref_cnt or block.is_null:
            wanted: tuple[int, ...] = (USED,)
        elif block.block_hash is None:
            wanted = (EMPTY,)
        else:
            wanted = (CACHED, READY)
        if state not in wanted:
            raise InvariantError(f"I7: block {block} is in state {state}, not {wanted}")
    listed = pool.free_block_queue.get_all_free_blocks()
    counts = [table.marks.count(state) for state in range(4)]
    if len(listed) != sum(counts[1:]) or len(listed) != pool.get_num_free_blocks():
        raise InvariantError(f"I7: {len(listed)} blocks are listed as free, of states {counts}")
    if (counts[EMPTY], counts[READY]) != (table.empty, table.ready):
        raise InvariantError(f"I7: {table.empty} empty, {table.ready} ready, found {counts}")
    head = [table.marks[b.block_id] for b in listed[: table.empty + table.ready]]
    if head != [EMPTY] * table.empty + [READY] * table.ready:
        raise InvariantError(f"I7: the free list begins with states {head}")
