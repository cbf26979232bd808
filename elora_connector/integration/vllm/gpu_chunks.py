"""Which chunk a GPU block belongs to, and what that chunk's KV is worth.

A chunk that has GPU blocks has a row.  Blocks short of a full chunk hang on the last
full one: they are of no use without it, and they go before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from elora_connector.core.node import Node
from elora_connector.core.policy_scores import ScoresOfNow
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import ChunkKey, Tier
from elora_connector.integration.vllm.gpu_table import BlockTable, IntArray

NO_ROW: Final = 0
_NO_KEY: Final = ChunkKey(b"")
_BACKED_SHARE: Final = 0.5


class ChunkRows:
    """Keys and parents of the chunks in the GPU; row 0 stands for no chunk."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.keys: list[ChunkKey] = [_NO_KEY]
        self.parents: list[int] = [NO_ROW]
        self._row_of: dict[ChunkKey, int] = {}

    def row(self, key: ChunkKey, parent: int) -> int:
        """The chunk's row; `parent` is that of the chunk in front of it."""
        row = self._row_of.get(key)
        if row is None:
            row = self._row_of[key] = len(self.keys)
            self.keys.append(key)
            self.parents.append(parent)
        return row

    def find(self, key: ChunkKey) -> int:
        """The chunk's row; NO_ROW if it has none."""
        return self._row_of.get(key, NO_ROW)

    def compact(self, block_rows: NDArray[np.int32]) -> None:
        """Forget rows without blocks, once there are many; renumbers `block_rows`."""
        if len(self.keys) <= self._limit:
            return
        parents = np.array(self.parents, dtype=np.int32)
        kept = np.zeros(len(parents), dtype=np.bool_)
        rows = np.unique(block_rows)
        while len(rows):
            kept[rows] = True
            rows = np.unique(parents[rows])
            rows = rows[~kept[rows]]
        kept[NO_ROW] = True
        number = np.cumsum(kept, dtype=np.int32) - 1
        old = np.flatnonzero(kept).tolist()
        self.keys = [self.keys[row] for row in old]
        self.parents = number[parents[old]].tolist()
        self._row_of = {key: row for row, key in enumerate(self.keys) if row}
        block_rows[:] = number[block_rows]
        self._limit = max(self._limit, 2 * len(self.keys))


class _Window:
    """A run of free blocks, oldest first, seen as chunks.

    Closed under "child of": vLLM frees children before their parents.
    """

    def __init__(self, ids: IntArray, rows: ChunkRows, block_rows: NDArray[np.int32]) -> None:
        self.ids = ids
        self.rows, inverse = np.unique(block_rows[ids], return_inverse=True)
        by_row = np.argsort(inverse, kind="stable")
        self._blocks = ids[by_row]
        self.counts = np.bincount(inverse, minlength=len(self.rows))
        self._ends = np.cumsum(self.counts)
        parents = np.array([rows.parents[row] for row in self.rows.tolist()], dtype=np.int64)
        place = np.searchsorted(self.rows, parents)
        place[place == len(self.rows)] = 0
        inside = (self.rows[place] == parents) & (parents != NO_ROW)
        self.parents: list[int] = np.where(inside, place, -1).tolist()
        self.children: list[int] = np.bincount(place[inside], minlength=len(self.rows)).tolist()

    def blocks(self, place: int) -> list[int]:
        """Blocks of one chunk, those that nothing stands on first."""
        end = int(self._ends[place])
        found: list[int] = self._blocks[end - int(self.counts[place]) : end].tolist()
        return found


def victims(
    ids: IntArray,
    count: int,
    rows: ChunkRows,
    table: BlockTable,
    scores: ScoresOfNow,
    tree: DependencyTree,
) -> IntArray:
    """Which `count` of the free blocks `ids` (oldest first) to reuse, in order.

    Chunks by ascending score, each only after all that stands on it; chunks that the
    host tier does not hold come last, oldest first.  Where most blocks are not held
    there, that would wear out the few that are: then all go oldest first.
    """
    window = _Window(ids, rows, table.row)
    nodes = [tree.find(rows.keys[row]) for row in window.rows.tolist()]
    held = [node if node is not None and node.ready(Tier.HOST) else None for node in nodes]
    backed = np.array([node is not None for node in held], dtype=np.bool_)
    if window.counts[backed].sum() < _BACKED_SHARE * len(ids):
        return ids[:count]
    lowest = _lowest(window, held, scores, count)
    return np.array(_leaf_first(ids, lowest, table, count), dtype=np.int64)


def _lowest(
    window: _Window, held: Sequence[Node | None], scores: ScoresOfNow, count: int
) -> list[int]:
    """Blocks of at least `count`, or all, held chunks that nothing stands on but such."""
    leaves = [
        place for place, node in enumerate(held) if node is not None and not window.children[place]
    ]
    scores.add([node for place in leaves if (node := held[place]) is not None])
    heap = [(scores.of(node), place) for place in leaves if (node := held[place]) is not None]
    heapq.heapify(heap)
    chosen: list[int] = []
    children = list(window.children)
    while heap and len(chosen) < count:
        _, place = heapq.heappop(heap)
        chosen.extend(window.blocks(place))
        above = window.parents[place]
        if above >= 0:
            children[above] -= 1
            node = held[above]
            if not children[above] and node is not None:
                heapq.heappush(heap, (scores.of(node), above))
    return chosen


def _leaf_first(ids: IntArray, wanted: list[int], table: BlockTable, count: int) -> list[int]:
    """`wanted`, then the rest of `ids`, each block only after those that stand on it.

    Chunks may share blocks, so an order that is right for chunks need not be for blocks.
    """
    parents = table.parents(ids)
    standing = np.bincount(parents, minlength=len(table.parent))
    parent = dict(zip(ids.tolist(), parents.tolist(), strict=True))
    chosen: dict[int, None] = {}
    asked: set[int] = set()
    for wish in chain(wanted, ids.tolist()):
        asked.add(wish)
        block = wish
        while block in asked and not standing[block] and block not in chosen:
            chosen[block] = None
            block = parent[block]
            standing[block] -= 1
        if len(chosen) >= count:
            break
    return list(chosen)[:count]
