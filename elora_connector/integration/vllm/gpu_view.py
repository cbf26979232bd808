"""The scheduler side's GPU tier: which KV is in vLLM's blocks, and what goes first.

Joins the block table, the chunks and the order of reuse; `SchedulerSide` tells it what
requests get and compute.  Exists only while vLLM's prefix caching is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from elora_connector.core.ledger import AdapterLedger
from elora_connector.core.node import Node
from elora_connector.core.policy_scores import ScoresOfNow
from elora_connector.core.types import ChunkKey, Tier
from elora_connector.integration.vllm.block_pool import PoolView
from elora_connector.integration.vllm.gpu_check import check_dormant, check_order, check_table
from elora_connector.integration.vllm.gpu_chunks import NO_ROW, ChunkRows, victims
from elora_connector.integration.vllm.gpu_order import BlockOrder
from elora_connector.integration.vllm.gpu_recipes import RecipeBook
from elora_connector.integration.vllm.gpu_table import BlockTable, IntArray
from elora_connector.integration.vllm.requests import RequestTracker
from elora_connector.manager import Manager
from elora_connector.metrics import Recorder

_WINDOW: Final = 2048
"""Free blocks that compete by score, those freed first: bounds the work of a choice."""
_GAUGE_EVERY_S: Final = 0.1


class GpuView:
    """What is in vLLM's GPU blocks.

    Args:
        pool: vLLM's BlockPool.
        owners: the same pool's owners by adapter name.
        ledger: None without LoRA: then nothing is ever dormant.
        blocks_per_chunk: blocks of one chunk.
        checks: verify I7 whenever vLLM takes blocks (slow).
    """

    def __init__(
        self,
        pool: Any,
        owners: PoolView,
        manager: Manager,
        ledger: AdapterLedger | None,
        recorder: Recorder,
        *,
        blocks_per_chunk: int,
        checks: bool,
    ) -> None:
        self.pool = pool
        self.owners = owners
        self.manager = manager
        self._ledger = ledger
        self.recorder = recorder
        self.per_chunk = blocks_per_chunk
        self.recipes: RecipeBook | None = None
        """Kept up where chunks may be prefetched."""
        self.table = BlockTable(pool.blocks, owners.owner)
        self.rows = ChunkRows(limit=max(1024, 2 * len(pool.blocks)))
        order = _CheckedOrder if checks else BlockOrder
        self.order = order(pool, self.table, owners.index, self._choose, _WINDOW)
        if isinstance(self.order, _CheckedOrder):
            self.order.view = self
        if ledger is not None:
            ledger.slot_watch.add(self.order)
        self._gauged = -_GAUGE_EVERY_S
        self._ordered_seen = 0

    # ---- requests --------------------------------------------------------------------

    def given(self, tracker: RequestTracker, first: int) -> None:
        """The request got blocks, in its table from number `first` on."""
        ids = tracker.blocks[first:]
        if ids:
            self.table.hang(ids, self._last_row(tracker))
            self.table.give(ids, tracker.blocks[first - 1] if first else 0)

    def complete(self, tracker: RequestTracker, keys: Sequence[ChunkKey]) -> None:
        """The request's first ``len(keys)`` chunks have keys, so its blocks belong to them."""
        done = tracker.gpu_chunks
        if len(keys) <= done:
            return
        rows, row = [], self._last_row(tracker)
        for key in keys[done:]:
            row = self.rows.row(key, row)
            rows.append(row)
        blocks, start, end = tracker.blocks, done * self.per_chunk, len(keys) * self.per_chunk
        belongs = np.repeat(np.array(rows, dtype=np.int32), self.per_chunk)
        self.table.row[blocks[start:end]] = belongs[: len(blocks) - start]
        self.table.row[blocks[end:]] = row
        tracker.gpu_chunks = len(keys)
        if self.recipes is not None and tracker.identity is not None:
            self.recipes.note(tracker.request, tracker.identity, keys, done)

    def place(self, nodes: Sequence[Node], ids: Sequence[int], before: int) -> None:
        """Blocks `ids`, behind block `before` (0: none), will hold a run of chunks."""
        self.table.give(ids, before)
        rows, row = [], int(self.table.row[before]) if before else NO_ROW
        for node in nodes:
            row = self.rows.row(node.key, row)
            rows.append(row)
        self.table.row[ids] = np.repeat(np.array(rows, dtype=np.int32), self.per_chunk)

    def hit(self, tracker: RequestTracker, blocks: int) -> None:
        """vLLM's own cache had the request's first `blocks` blocks."""
        if not blocks:
            return
        ids = tracker.blocks[:blocks]
        prefetched = int(self.table.fresh[ids].sum())
        if prefetched:
            self.table.fresh[ids] = False
            self.recorder.add("prefetched_blocks_hit", prefetched)

    def _last_row(self, tracker: RequestTracker) -> int:
        if not tracker.gpu_chunks or tracker.hasher is None:
            return NO_ROW
        return self.rows.find(tracker.hasher.keys[tracker.gpu_chunks - 1])

    # ---- steps -----------------------------------------------------------------------

    def before_step(self, now: float, count: int) -> None:
        """Put the blocks that the next step can take at most in order."""
        self.order.now = now
        self.order.line_up()
        self.order.need(min(count, self.pool.get_num_free_blocks()))
        self.rows.compact(self.table.row)
        if now - self._gauged >= _GAUGE_EVERY_S:
            self._gauged = now
            self._gauge()

    def after_step(self) -> None:
        """Reports were taken in, requests have ended."""
        self.order.follow_reset()
        self.order.line_up()

    def _choose(self, ids: IntArray, count: int) -> IntArray:
        tree = self.manager.tree
        scores = ScoresOfNow(tree, self.manager.policy, Tier.GPU, self.order.now)
        return victims(ids, count, self.rows, self.table, scores, tree)

    def _gauge(self) -> None:
        dormant, misplaced = self.order.counts()
        free = len(self.table.free_cached())
        cached = max(free, len(self.pool.cached_block_hash_to_block), 1)
        record = self.recorder
        record.set("invalid_kv_ratio", dormant / cached, "all")
        record.set("invalid_kv_ratio", misplaced / cached, "misplaced")
        record.set("dormant_blocks", dormant)
        if self.order.ordered > self._ordered_seen:
            record.add("victims_ordered", self.order.ordered - self._ordered_seen)
            self._ordered_seen = self.order.ordered

    # ---- checks ----------------------------------------------------------------------

    def check(self) -> None:
        """The view agrees with vLLM's pool."""
        self.order.follow_reset()
        check_table(self.pool, self.order)

    def check_order(self, count: int) -> None:
        """The first `count` free blocks are in order (I7)."""
        count = min(count, self.pool.get_num_free_blocks())
        names = ["", *self.owners.names]
        slotted = frozenset() if self._ledger is None else self._ledger.slot_watch.names
        check_order(self.pool, self.table, names, slotted, count)
        check_dormant(self.pool, self.order, count)


class _CheckedOrder(BlockOrder):
    """Verifies I7 at every take."""

    view: GpuView | None = None

    def need(self, count: int) -> None:
        super().need(count)
        if self.view is not None:
            self.view.check()
            self.view.check_order(count)
