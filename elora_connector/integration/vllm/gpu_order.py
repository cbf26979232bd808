"""What vLLM reuses next (I7): un-hashed blocks, then dormant ones, then the lowest scores.

Dormant is the KV of an adapter that the ledger counts in no GPU slot.  Its blocks stay
hits until their memory is needed.  Which blocks are dormant is looked up again when vLLM
takes some, so the order never lags behind the ledger; between steps the dormant ones are
moved to the front of vLLM's list as well, up to a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from elora_connector.integration.vllm.gpu_queue import OrderedQueue, watch
from elora_connector.integration.vllm.gpu_table import READY, BlockTable, IntArray

Chooser = Callable[[IntArray, int], IntArray]
"""(free blocks, oldest first; how many) -> those to reuse, in order."""

_FIRST_NAMES: Final = 64
_BATCH: Final = 256
_LINED_UP: Final = 16384
_MAX_AGE_S: Final = 0.1


_NONE: Final = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class _Lists:
    """Free cached blocks by the time they were freed, with the stamps they had.

    Blocks freed later have higher stamps, so the oldest stay the oldest: the lists are
    made anew only when they are used up or adapters came or went.
    """

    dormant: IntArray
    dormant_stamps: IntArray
    valid: IntArray
    valid_stamps: IntArray
    whole: bool
    """`valid` holds every valid block, not the oldest only."""


class BlockOrder:
    """Keeps the head of vLLM's free list in order, a batch at a time.

    Args:
        pool: vLLM's BlockPool.
        table: of its blocks.
        name_index: adapter name -> index in `table.owner`, adding new names.
        choose: orders free blocks of resident adapters.
        window: how many blocks it is given at most, those freed first.

    Attributes:
        now: time of the step being scheduled, seconds.
    """

    def __init__(
        self,
        pool: Any,
        table: BlockTable,
        name_index: Callable[[str], int],
        choose: Chooser,
        window: int,
    ) -> None:
        self.now = -math.inf
        self.table = table
        self.ordered = 0
        """Blocks put in front so far."""
        self._pool = pool
        self._index = name_index
        self._choose = choose
        self._window = window
        self._away = np.zeros(_FIRST_NAMES, dtype=np.bool_)
        self._stale = False
        self._aged = math.inf
        self._front = _NONE
        self._lists = _Lists(_NONE, _NONE, _NONE, _NONE, whole=False)
        self.queue: OrderedQueue = watch(pool, table, self)
        self._map = pool.cached_block_hash_to_block

    # ---- adapters --------------------------------------------------------------------

    def slot_taken(self, name: str) -> None:
        """See `core.slot_watch.SlotListener`."""
        self._set_away(name, False)

    def slot_left(self, name: str) -> None:
        """See `core.slot_watch.SlotListener`."""
        self._set_away(name, True)

    def _set_away(self, name: str, away: bool) -> None:
        index = self._index(name)
        while index >= len(self._away):
            self._away = np.concatenate((self._away, np.zeros_like(self._away)))
        if self._away[index] != away:
            self._away[index] = away
            self._stale = True

    def dormant(self, ids: IntArray) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each block holds KV of an adapter without a slot; bool [n]."""
        away: np.ndarray[Any, np.dtype[np.bool_]] = self._away[self.table.owner[ids]]
        return away

    # ---- called by the queue ---------------------------------------------------------

    def need(self, count: int) -> None:
        """Put the first `count` blocks of the list in order."""
        self.follow_reset()
        table = self.table
        short = count - table.empty
        if short <= 0:
            return
        if self._stale or short > table.ready or self.now > self._aged:
            self._arrange(max(2 * short, _BATCH))

    def freed(self, block_ids: Sequence[int]) -> None:
        """Dormant blocks that become free belong before valid ones that stand in front."""
        if self._lists.whole:
            self._lists.whole = False  # there is one more now
        if not self._stale:
            owners = self.table.owner[np.array(block_ids, dtype=np.int64)]
            self._stale = bool(self._away[owners].any())

    def freed_late(self) -> None:
        """The oldest blocks are not the oldest any more."""
        self._lists = _Lists(_NONE, _NONE, _NONE, _NONE, whole=False)

    def follow_reset(self) -> None:
        """vLLM may have dropped its whole prefix cache, which nobody tells us."""
        if self._pool.cached_block_hash_to_block is not self._map:
            self._map = self._pool.cached_block_hash_to_block
            self.table.load(self._pool.blocks)
            self._stale = True

    def line_up(self) -> None:
        """Between steps: dormant blocks right behind the un-hashed ones."""
        if self._stale:
            self._list(self._window)
            dormant = len(self._lists.dormant)
            if dormant:
                self._arrange(min(dormant, _LINED_UP))

    def counts(self) -> tuple[int, int]:
        """Free dormant blocks; those of them not first in line after the un-hashed ones."""
        front = self._front[self.table.state[self._front] == READY]
        dormant = self.dormant(front)
        first = len(front) if dormant.all() else int(np.argmin(dormant))
        total = int(self.dormant(self.table.free_cached()).sum())
        return total, total - first

    # ---- choosing --------------------------------------------------------------------

    def next_blocks(self, count: int) -> IntArray:
        """Ids of the `count` free cached blocks to reuse first, in order."""
        table = self.table
        if self._stale or self._lists.valid is _NONE:
            self._list(count)
        lists = self._lists
        chosen = lists.dormant[table.still_free(lists.dormant, lists.dormant_stamps)][:count]
        missing = count - len(chosen)
        if missing > 0:
            valid = lists.valid[table.still_free(lists.valid, lists.valid_stamps)]
            if len(valid) < max(missing, self._window // 2) and not lists.whole:
                self._list(missing)
                valid = self._lists.valid
            chosen = np.concatenate((chosen, self._choose(valid, missing)))
        return chosen

    def _list(self, count: int) -> None:
        table = self.table
        free = table.free_cached()
        away = self.dormant(free)
        dormant, valid = free[away], free[~away]
        limit = max(self._window, count)
        whole = len(valid) <= limit
        dormant, valid = table.oldest(dormant, len(dormant)), table.oldest(valid, limit)
        stamp = table.stamp
        self._lists = _Lists(dormant, stamp[dormant], valid, stamp[valid], whole=whole)

    def _arrange(self, count: int) -> None:
        table = self.table
        table.unready()
        chosen = self.next_blocks(count)
        blocks = self._pool.blocks
        self.queue.put_in_front([blocks[block] for block in chosen.tolist()])
        table.make_ready(chosen)
        self._front = chosen
        self.ordered += len(chosen)
        self._stale = False
        # Scores go stale, the order in which dormant blocks were freed does not.
        scored = len(chosen) and not self.dormant(chosen[-1:])[0]
        self._aged = self.now + _MAX_AGE_S if scored else math.inf
