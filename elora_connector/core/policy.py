"""What is evicted first.  A policy is told facts and returns numbers; it does no I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np

from elora_connector.core.leaves import FloatArray, LeafTable


class EvictionPolicy(Protocol):
    """Gives every candidate a score.

    Changes no state of the tree and may not assume that what it ranked first is
    evicted.  Called by the thread that owns the tree.
    """

    def scores(self, table: LeafTable, now: float) -> FloatArray:
        """Scores of shape [len(table)]; the lowest is evicted first, +inf and NaN never.

        May be a view of a column.  `table` may also hold nodes that are about to become
        leaves, so only its columns may be used.
        """
        ...


class LRU:
    """Least recently used first."""

    def scores(self, table: LeafTable, now: float) -> FloatArray:
        return table.last


class MRU:
    """Most recently used first."""

    def scores(self, table: LeafTable, now: float) -> FloatArray:
        return -table.last


class FIFO:
    """First created first."""

    def scores(self, table: LeafTable, now: float) -> FloatArray:
        return table.seq.astype(np.float64)


class LFU:
    """Least frequently used first, by decayed visits."""

    def scores(self, table: LeafTable, now: float) -> FloatArray:
        return table.visits(now)


_POLICIES: Final[dict[str, Callable[[], EvictionPolicy]]] = {
    "fifo": FIFO,
    "lfu": LFU,
    "lru": LRU,
    "mru": MRU,
}


def policy_named(name: str) -> EvictionPolicy:
    """A new policy without parameters by its name, as written in a configuration.

    Raises:
        ValueError: no such policy; the message names the legal ones.
    """
    try:
        return _POLICIES[name]()
    except KeyError:
        legal = ", ".join(sorted(_POLICIES))
        raise ValueError(f"unknown eviction policy {name!r}; legal: {legal}") from None
