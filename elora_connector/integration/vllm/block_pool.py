"""The scheduler's view of vLLM's GPU block pool: owners, pins, un-hashing.

Works on `vllm.v1.core.block_pool.BlockPool` (0.29-0.32), in the scheduler's thread,
between vLLM's own uses of it; no lock is needed.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

_NO_OWNER = 0
_HASH_BYTES = 32


def disguise(request: Any) -> None:
    """Give a request's blocks hashes that no other request can have, now and later.

    vLLM registers blocks of a running request in every schedule(), before we can take
    them out, and may match another request against them in that same schedule().
    """
    honest = request._block_hasher
    if honest is None:
        return  # prefix caching is off
    request._block_hasher = lambda r: [secrets.token_bytes(_HASH_BYTES) for _ in honest(r)]
    request.block_hashes[:] = [secrets.token_bytes(_HASH_BYTES) for _ in request.block_hashes]


class PoolView:
    """Per-block owners (by adapter name) and the pins of stores under way.

    The adapter is not recoverable from a block hash, so the owner is noted whenever a
    request gets a block: a cached block was always in some request's table.

    Args:
        pool: vLLM's BlockPool.
        pin_share: share of the pool that stores may keep from being reused.
    """

    def __init__(self, pool: Any, pin_share: float) -> None:
        self._pool = pool
        self.owner = np.zeros(len(pool.blocks), dtype=np.int32)
        """Index of the adapter name that had each block last, 0: nobody."""
        self.names: dict[str, int] = {}
        self._drops: Counter[str] = Counter()
        self._pinned: dict[int, list[Any]] = {}
        self.pinned = 0
        self.pin_limit = int(pin_share * len(pool.blocks))

    def has_prefix(self, request: Any, blocks: int) -> bool:
        """Does vLLM's prefix cache very likely hold the request's first `blocks` blocks?

        Only the last one is looked for: a parent stands behind its children in vLLM's
        queue, so it is evicted after them.
        """
        hashes = request.block_hashes
        if not 0 < blocks <= len(hashes) or request.skip_reading_prefix_cache:
            return False
        return self._pool.get_cached_block(hashes[blocks - 1], [0]) is not None

    def own(self, name: str, block_ids: Iterable[int]) -> None:
        """These blocks belong to a request of adapter `name` from now on."""
        self.owner[list(block_ids)] = self.index(name)

    def index(self, name: str) -> int:
        """Index of an adapter name in `owner`; new names get one."""
        return self.names.setdefault(name, len(self.names) + 1)

    def drop(self, name: str) -> int:
        """Un-hash every cached block of an adapter name, running requests' ones too.

        Returns:
            How many blocks left the prefix cache.
        """
        self._drops[name] += 1
        index = self.names.get(name, _NO_OWNER)
        if index == _NO_OWNER:
            return 0
        ids = np.flatnonzero(self.owner == index).tolist()
        return self.unhash(ids)

    def drops(self, name: str) -> int:
        """How often the blocks of an adapter name were dropped."""
        return self._drops[name]

    def unhash(self, block_ids: Iterable[int]) -> int:
        """Take blocks out of the prefix cache and offer the free ones for reuse first.

        vLLM un-hashes in place, which would leave an empty block deep in the queue while
        cached ones in front of it are overwritten.
        """
        blocks = self._pool.blocks
        cached = [b for b in block_ids if blocks[b].block_hash is not None]
        if not cached:
            return 0
        self._pool.evict_blocks(set(cached))
        queue = self._pool.free_block_queue
        idle = [blocks[b] for b in cached if blocks[b].ref_cnt == 0 and not blocks[b].is_null]
        for block in idle:
            queue.remove(block)
        queue.prepend_n(idle)
        return len(cached)

    @property
    def pin_room(self) -> int:
        """Blocks that may be pinned now."""
        return max(0, self.pin_limit - self.pinned)

    def pin(self, job_id: int, block_ids: Iterable[int]) -> None:
        """Keep blocks from being reused until the job's copy has ended."""
        blocks = [self._pool.blocks[b] for b in block_ids]
        self._pool.touch(blocks)
        self._pinned[job_id] = blocks
        self.pinned += len(blocks)

    def unpin(self, job_id: int) -> None:
        """The copy ended; last block first, as vLLM frees a request's blocks."""
        blocks = self._pinned.pop(job_id, None)
        if blocks:
            self.pinned -= len(blocks)
            self._pool.free_blocks(reversed(blocks))

    def unpin_all(self) -> None:
        for job_id in list(self._pinned):
            self.unpin(job_id)
