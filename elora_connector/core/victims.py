"""VictimQueue: what to evict from a tier, all of it or nothing.

Scoring every leaf for every eviction is too slow, and an ordered structure has to
be kept up on every touch.  Instead the `k` lowest scores are taken now and then,
and used until they are used up or `max_age` old.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

import numpy as np

from elora_connector.core.leaves import FloatArray, IntArray, LeafTable
from elora_connector.core.node import PINS, Node, NodeKind, Run
from elora_connector.core.policy import EvictionPolicy
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import Tier

_Entry = tuple[float, int, int, Run, Node]
"""A candidate as it was scored: score, seq, tie-break, run, node.

Ordered by score, then by age.  Chunks of one run tie; the third number, no two of which are
alike for them, only keeps runs from being compared.  An entry whose run is not the node's any
more is stale: the node was touched or resized since.
"""
_LEAF: Final = 0

_GROWTH: Final = 4
_RUN: Final = 32
_RUNS: Final = 16
"""Ancestors of how many more candidates are scored along: the fixed cost of a few vector
operations is higher than that of a few more rows."""

_nbytes_of: Callable[[Node], int] = attrgetter("nbytes")


def _is_current(entry: _Entry) -> bool:
    return entry[4].run is entry[3]


def _one(node: Node) -> int:
    return 1


@dataclass(slots=True)
class _Selection:
    """One selection in progress.  `popped` goes back to the heap when it ends."""

    need: int
    weigh: Callable[[Node], int]
    exclude: Container[Node]
    cursor: int = 0
    got: int = 0
    chosen: list[Node] = field(default_factory=list)
    taken_children: dict[Node, int] = field(default_factory=dict)
    popped: list[_Entry] = field(default_factory=list)

    def take(self, node: Node) -> None:
        self.chosen.append(node)
        self.got += self.weigh(node)
        parent = node.parent
        if parent is not None:
            self.taken_children[parent] = self.taken_children.get(parent, 0) + 1


class VictimQueue:
    """Chooses victims of one tier by ascending score, without changing the tree.

    A selection that is not followed by the evictions loses nothing: what it chose is
    chosen again by the next one.

    Args:
        tree: the caller evicts (`set_absent`) what it is given, in that order.
        tier: whose leaves are candidates.
        policy: gives the scores.
        k: candidates kept.
        max_age: seconds; older scores are computed again once something is selected.
        kind: only adapters or only chunks, where a tier has two physical areas.
    """

    def __init__(
        self,
        tree: DependencyTree,
        tier: Tier,
        policy: EvictionPolicy,
        k: int = 1024,
        max_age: float = 0.1,
        kind: NodeKind | None = None,
    ) -> None:
        if k < 1:
            raise ValueError(f"k must be positive, got {k}")
        self.tier = tier
        self.policy = policy
        self.kind = kind
        self.refreshes = 0
        """How often the whole table was scored."""
        self._tree = tree
        self._table = tree.leaves[tier]
        self._k = k
        self._max_age = max_age
        self._scored_at = -math.inf
        self._seen_changes = -1
        self._truncated = False
        self._leaves: list[_Entry] = []
        self._cursor = 0
        # Parents whose resident children were all chosen or evicted since the refresh.
        self._parents: list[_Entry] = []
        self._queued: dict[Node, _Entry] = {}
        self._ahead: dict[Node, _Entry] = {}
        self._tie_breaks = itertools.count(_LEAF - 1, -1)
        self._scratch = LeafTable(tier, tree.clock)

    def select_bytes(
        self, nbytes: int, now: float, exclude: Container[Node] = frozenset()
    ) -> list[Node]:
        """Victims of at least `nbytes` bytes, to be evicted one after the other.

        A parent may follow its last resident child.  Nodes in `exclude` are not chosen.
        Empty when `nbytes` <= 0, and when there is not enough: then nothing is to be done.
        """
        if not 0 < nbytes <= self._tree.used_bytes(self.tier, self.kind):
            return []
        return self._select(nbytes, _nbytes_of, now, exclude, self._k)

    def select_count(
        self, count: int, now: float, exclude: Container[Node] = frozenset()
    ) -> list[Node]:
        """`count` victims; otherwise as `select_bytes`."""
        if not 0 < count <= self._tree.num_resident(self.tier, self.kind):
            return []
        return self._select(count, _one, now, exclude, max(self._k, count))

    def _select(
        self,
        need: int,
        weigh: Callable[[Node], int],
        now: float,
        exclude: Container[Node],
        k: int,
    ) -> list[Node]:
        if not 0 <= now - self._scored_at <= self._max_age:
            self._refresh(now, k)
        while True:
            selection = _Selection(need, weigh, exclude)
            self._pick(selection)
            if selection.got >= need:
                return selection.chosen
            if self._seen_changes == self._table.changes:
                if not self._truncated:
                    return []
                k *= _GROWTH
            self._refresh(now, k)

    # Picking from what was scored

    def _pick(self, selection: _Selection) -> None:
        while self._cursor < len(self._leaves) and not self._is_leaf(self._leaves[self._cursor]):
            self._cursor += 1
        selection.cursor = self._cursor
        while selection.got < selection.need:
            entry = self._next(selection)
            if entry is None:
                break
            node = entry[4]
            if node not in selection.exclude:
                selection.take(node)
                self._join(node.parent, selection)
        for entry in selection.popped:
            heapq.heappush(self._parents, entry)

    def _is_leaf(self, entry: _Entry) -> bool:
        return entry[4].rows[self.tier] >= 0 and _is_current(entry)

    def _next(self, selection: _Selection) -> _Entry | None:
        """The lowest scored leaf or parent that is left; None when used up."""
        leaf = self._next_leaf(selection)
        parent = self._next_parent(selection)
        if leaf is not None and (parent is None or leaf < parent):
            selection.cursor += 1
            return leaf
        if parent is None:
            return None
        if leaf is None and self._truncated and parent > self._leaves[-1]:
            return None  # one of the leaves cut off by k may score lower
        selection.popped.append(heapq.heappop(self._parents))
        return parent

    def _next_leaf(self, selection: _Selection) -> _Entry | None:
        while selection.cursor < len(self._leaves):
            entry = self._leaves[selection.cursor]
            if self._is_leaf(entry):
                return entry
            selection.cursor += 1
        return None

    def _next_parent(self, selection: _Selection) -> _Entry | None:
        while self._parents:
            entry = self._parents[0]
            node = entry[4]
            if _is_current(entry) and self._would_be_leaf(node, selection):
                return entry
            heapq.heappop(self._parents)
            if self._queued.get(node) is entry:
                del self._queued[node]
        return None

    def _would_be_leaf(self, node: Node, selection: _Selection) -> bool:
        return (
            node.attached
            and node.ready(self.tier)
            and not node.counts[PINS]
            and node.counts[self.tier] == selection.taken_children.get(node, 0)
        )

    # Parents that become leaves

    def _join(self, parent: Node | None, selection: _Selection) -> None:
        if parent is None or not self._wanted(parent) or not self._tree.dependency_rule:
            return
        if not self._would_be_leaf(parent, selection):
            return
        entry = self._queued.get(parent)
        if entry is not None and _is_current(entry):
            return
        entry = self._ahead.get(parent)
        if entry is None or not _is_current(entry):
            entry = self._score_ahead(parent)
        if entry[0] < math.inf:
            self._queued[parent] = entry
            heapq.heappush(self._parents, entry)

    def _wanted(self, node: Node) -> bool:
        return self.kind is None or node.kind is self.kind

    def _score_ahead(self, parent: Node) -> _Entry:
        """Score a run of ancestors at once: a long chain is mostly evicted in one go."""
        run = self._run_from(parent)
        for entry in self._leaves[self._cursor : self._cursor + _RUNS]:
            above = entry[4].parent
            if above is not None and above is not parent and above not in self._ahead:
                run += self._run_from(above)
        run = list(dict.fromkeys(run))
        self._scratch.fill(run)
        # At the time of the refresh, or the two kinds of scores could not be compared.
        scores = self.policy.scores(self._scratch, self._scored_at).tolist()
        for node, score in zip(run, scores, strict=True):
            shared = node.run
            self._ahead[node] = (score, shared.seq, next(self._tie_breaks), shared, node)
        return self._ahead[parent]

    def _run_from(self, first: Node) -> list[Node]:
        """`first` and its ancestors up to a fork, where evicting one branch frees nobody."""
        run: list[Node] = []
        node: Node | None = first
        while node is not None and node.adapter is not None and len(run) < _RUN:
            if run and node.counts[self.tier] > 1:
                break
            run.append(node)
            node = node.parent
        return run

    # Scoring

    def _refresh(self, now: float, k: int) -> None:
        table = self._table
        scores = self.policy.scores(table, now)
        # Without the rule a parent and its child may tie, and the child has to go first.
        ages = table.seq if self._tree.dependency_rule else -table.seq
        rows = self._eligible(scores)
        self._truncated = len(rows) > k
        if self._truncated:
            rows = _lowest(rows, scores, ages, k)
        rows = rows[np.lexsort((ages[rows], scores[rows]))]
        nodes = [table.nodes[row] for row in rows.tolist()]
        self._leaves = [
            (score, age, _LEAF, node.run, node)
            for score, age, node in zip(
                scores[rows].tolist(), ages[rows].tolist(), nodes, strict=True
            )
        ]
        self._cursor = 0
        self._parents.clear()
        self._queued.clear()
        self._ahead.clear()
        self._scored_at = now
        self._seen_changes = table.changes
        self.refreshes += 1

    def _eligible(self, scores: FloatArray) -> IntArray:
        eligible = scores < np.inf
        if self.kind is not None:
            eligible &= self._table.is_adapter == (self.kind is NodeKind.ADAPTER)
        return np.flatnonzero(eligible).astype(np.int64, copy=False)


def _lowest(rows: IntArray, scores: FloatArray, seq: IntArray, k: int) -> IntArray:
    """The `k` of `rows` with the lowest (score, seq), in no order; needs len(rows) > k.

    Ties at the border go to the older nodes, which argpartition alone does not promise.
    """
    values = scores[rows]
    border = np.partition(values, k - 1)[k - 1]
    below = rows[values < border]
    ties = rows[values == border]
    room = k - len(below)
    if len(ties) > room:
        ties = ties[np.argpartition(seq[ties], room - 1)[:room]]
    return np.concatenate((below, ties))
