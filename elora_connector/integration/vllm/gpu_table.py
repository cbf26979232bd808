"""What is known of each GPU block, by block id, in arrays.

Kept up by `OrderedQueue` (blocks that are given out, taken, freed) and by the scheduler
side (whose KV a block holds, which chunk it belongs to).  Nothing here walks vLLM's
free list: selecting is a matter of a few vector operations over the arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

USED: Final = 0
"""Referenced by a request, a store or a prefetch, or vLLM's null block."""
EMPTY: Final = 1
"""Free and not in the prefix cache."""
CACHED: Final = 2
"""Free, its KV can be hit until it is reused."""
READY: Final = 3
"""As CACHED, and already put where vLLM takes blocks next."""


_FEW: Final = 8
"""Up to here a loop is faster than a vector operation."""
_GAP: Final = 1 << 20
"""Between two stamps, for blocks that are freed after their parent."""


class BlockTable:
    """Arrays over all blocks of one pool.

    Attributes:
        state: USED, EMPTY, CACHED or READY of each block.
        owner: index of the adapter name whose KV a block holds or held last (`PoolView`).
        stamp: when a block was freed last; of two free cached blocks vLLM's own order has
            the lower stamp first, and in it a block stands before its parent.
        row: row of the block's chunk in `ChunkRows`, 0 for none.
        parent: the block in front of it in the request it was given to, 0 for none.
        birth: when it was given to that request; a parent with a later one has become
            another block since.
        fresh: prefetched and not hit since.
        empty: how many blocks are EMPTY.
        ready: how many blocks are READY.
    """

    def __init__(self, blocks: Sequence[Any], owner: NDArray[np.int32]) -> None:
        count = len(blocks)
        self.marks = bytearray(count)
        self.state = np.frombuffer(self.marks, dtype=np.uint8)
        self.owner = owner
        self._stamps = array("q", bytes(8 * count))
        self.stamp = np.frombuffer(self._stamps, dtype=np.int64)
        self._rows = array("i", bytes(4 * count))
        self.row = np.frombuffer(self._rows, dtype=np.int32)
        self._parents = array("i", bytes(4 * count))
        self.parent = np.frombuffer(self._parents, dtype=np.int32)
        self._births = array("q", bytes(8 * count))
        self.birth = np.frombuffer(self._births, dtype=np.int64)
        self._fresh = bytearray(count)
        self.fresh = np.frombuffer(self._fresh, dtype=np.bool_)
        self.empty = 0
        self.ready = 0
        self._clock = 0
        self._given = 0

    def give(self, block_ids: Sequence[int], before: int) -> None:
        """Blocks hold a run of tokens from now on, after those of block `before` (0: none)."""
        self._given += 1
        if len(block_ids) <= _FEW:
            for block_id in block_ids:
                self._births[block_id], self._parents[block_id] = self._given, before
                self._fresh[block_id] = 0
                before = block_id
            return
        self.birth[block_ids] = self._given
        self.parent[block_ids] = [before, *block_ids[:-1]]
        self.fresh[block_ids] = False

    def hang(self, block_ids: Sequence[int], row: int) -> None:
        """Blocks belong to the chunk of `row`, or stand on it."""
        if len(block_ids) <= _FEW:
            for block_id in block_ids:
                self._rows[block_id] = row
        else:
            self.row[block_ids] = row

    def still_free(self, ids: IntArray, stamps: IntArray) -> NDArray[np.bool_]:
        """Which blocks are free and cached as they were when they had these stamps."""
        same: NDArray[np.bool_] = (self.state[ids] >= CACHED) & (self.stamp[ids] == stamps)
        return same

    def parents(self, ids: IntArray) -> IntArray:
        """The block each one stands on; 0 where that is none any more; int64 [n]."""
        parents = self.parent[ids]
        return np.where(self.birth[parents] <= self.birth[ids], parents, 0)

    def late(self, block_ids: Sequence[int]) -> list[int]:
        """Those of blocks about to be freed whose parent is free and cached, parents first.

        A store that outlives its request keeps single blocks of it.
        """
        late: list[int] = []
        marks, parents, births = self.marks, self._parents, self._births
        for block_id in reversed(block_ids):
            parent = parents[block_id]
            free = marks[parent] >= CACHED or parent in late
            if free and births[parent] <= births[block_id]:
                late.append(block_id)
        return late

    def freed_under(self, block_id: int) -> int:
        """A late block was put right before its parent, which is returned."""
        parent = self._parents[block_id]
        self._stamps[block_id] = self._stamps[parent] - 1
        self.marks[block_id] = self.marks[parent]
        self.ready += self.marks[parent] == READY
        return parent

    def load(self, blocks: Iterable[Any]) -> None:
        """Take in the state of every block as vLLM has it now; nothing is READY then."""
        self.empty = self.ready = 0
        for block in blocks:
            if block.ref_cnt or block.is_null:
                state = USED
            else:
                state = CACHED if block.block_hash is not None else EMPTY
            self.marks[block.block_id] = state
            self.empty += state == EMPTY

    def taken(self, block_id: int) -> None:
        """A free block left the free list."""
        state = self.marks[block_id]
        self.marks[block_id] = USED
        if state == EMPTY:
            self.empty -= 1
        elif state == READY:
            self.ready -= 1

    def emptied(self, block_ids: Iterable[int]) -> None:
        """Blocks came to the head of the free list, with nothing in them to hit."""
        marks = self.marks
        for block_id in block_ids:
            marks[block_id] = EMPTY
            self.empty += 1

    def freed(self, block_ids: Sequence[int]) -> None:
        """Blocks came to the tail of the free list, in this order."""
        marks, stamps, clock = self.marks, self._stamps, self._clock
        for block_id in block_ids:
            marks[block_id] = CACHED
            clock += _GAP
            stamps[block_id] = clock
        self._clock = clock

    def free_cached(self) -> IntArray:
        """Ids of all free blocks that can be hit, CACHED or READY; int64 [n]."""
        return np.flatnonzero(self.state >= CACHED)

    def oldest(self, ids: IntArray, count: int) -> IntArray:
        """At most `count` of `ids`, those freed first, in that order."""
        stamps = self.stamp[ids]
        if len(ids) > count:
            chosen = np.argpartition(stamps, count - 1)[:count]
            ids, stamps = ids[chosen], stamps[chosen]
        return ids[np.argsort(stamps)]

    def make_ready(self, ids: IntArray) -> None:
        """They were put where vLLM takes blocks next."""
        self.state[ids] = READY
        self.ready = len(ids)

    def unready(self) -> None:
        """What was put in front counts as any other cached block again."""
        if self.ready:
            self.state[self.state == READY] = CACHED
            self.ready = 0
