"""LeafTable: the eviction candidates of one tier as dense numpy columns.

A policy scores all candidates with a handful of vector operations, so nothing
has to be kept in order while nodes are touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from elora_connector.core.node import NOT_LISTED, Node, NodeKind, with_row
from elora_connector.core.types import Residency, Tier

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_FIRST_CAPACITY: Final = 64

_READY: Final = Residency.READY

NO_COPY: Final = -1
"""In the column `copy`: the bytes are in no tier further away from the GPU."""


class VisitClock:
    """Exponentially decayed visit counts at the price of one addition per visit.

    A visit at `now` adds exp(phase(now) - base) to a node's weight, and the decayed count
    is weight x exp(-(phase(now) - base)), where the phase grows by one every `decay_s`
    seconds: the decay is one factor common to all nodes, so it may change its pace.

    Args:
        decay_s: time constant; inf makes it a plain count.
        turnovers: half-life counted in times that the memory was replaced as a whole, where
            that is shorter: what memory forgets within seconds must not be remembered by
            counts for minutes.  Inf: `decay_s` always.
    """

    __slots__ = (
        "_longest",
        "_phase",
        "_since",
        "_turned",
        "_turned_at",
        "base",
        "decay_s",
        "turnovers",
    )

    MAX_EXPONENT: Final = 64.0
    MEASURED_SHARE: Final = 0.25

    def __init__(self, decay_s: float = math.inf, turnovers: float = math.inf) -> None:
        if not decay_s > 0:
            raise ValueError(f"decay_s must be positive, got {decay_s}")
        if not turnovers > 0:
            raise ValueError(f"turnovers must be positive, got {turnovers}")
        self.decay_s = self._longest = decay_s
        self.turnovers = turnovers
        self.base = 0.0
        """Phase in which one visit weighs 1."""
        self._phase = 0.0
        self._since = 0.0
        self._turned = 0.0
        self._turned_at: float | None = None

    def phase(self, now: float) -> float:
        """Time in units of the time constant; a clock that went back stands still."""
        return self._phase + max(0.0, now - self._since) / self.decay_s

    def exponent(self, now: float) -> float:
        """Age of the base in units of the time constant."""
        return max(0.0, self.phase(now) - self.base)

    def gain(self, now: float) -> float:
        """Weight of one visit.  The caller rebases before the exponent passes its maximum."""
        return math.exp(self.exponent(now))

    def scale(self, now: float) -> float:
        """Factor from weight to decayed visits."""
        return math.exp(-self.exponent(now))

    def rebase(self, now: float) -> None:
        """Let a visit at `now` weigh 1; the caller scales all weights."""
        self.base = self.phase(now)

    def turned_over(self, share: float, now: float) -> None:
        """`share` of the memory was replaced, at `now`: adapt the pace now and then."""
        if self._turned_at is None:
            self._turned_at = now
        self._turned += share
        seconds = now - self._turned_at
        if self._turned < self.MEASURED_SHARE or not seconds > 0:
            return
        half_life = self.turnovers * seconds / self._turned
        self._phase, self._since = self.phase(now), max(now, self._since)
        self.decay_s = min(self._longest, half_life / math.log(2))
        self._turned, self._turned_at = 0.0, now


class LeafTable:
    """Exactly the unpinned READY nodes without resident children in one tier (I2, I3).

    Rows are dense and in no order: removal moves the last row into the hole.  The
    column properties are views of shape [len(table)], valid until the next change; a
    policy reads them and must not write.
    """

    __slots__ = (
        "_adapter",
        "_clock",
        "_copy",
        "_is_adapter",
        "_last",
        "_nbytes",
        "_seq",
        "_weight",
        "changes",
        "nodes",
        "tier",
    )

    def __init__(self, tier: Tier, clock: VisitClock | None = None) -> None:
        self.tier = tier
        self.nodes: list[Node] = []
        self.changes = 0
        """Raised by every change, so that a queue can tell whether it has seen them all."""
        self._clock = clock or VisitClock()
        self._last: FloatArray = np.empty(_FIRST_CAPACITY, np.float64)
        self._weight: FloatArray = np.empty(_FIRST_CAPACITY, np.float64)
        self._nbytes: IntArray = np.empty(_FIRST_CAPACITY, np.int64)
        self._seq: IntArray = np.empty(_FIRST_CAPACITY, np.int64)
        self._adapter: IntArray = np.empty(_FIRST_CAPACITY, np.int64)
        self._is_adapter: BoolArray = np.empty(_FIRST_CAPACITY, np.bool_)
        self._copy: NDArray[np.int8] = np.empty(_FIRST_CAPACITY, np.int8)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def last(self) -> FloatArray:
        """Time of last use, seconds."""
        return self._last[: len(self.nodes)]

    @property
    def nbytes(self) -> IntArray:
        """Size in bytes."""
        return self._nbytes[: len(self.nodes)]

    @property
    def seq(self) -> IntArray:
        """Creation number."""
        return self._seq[: len(self.nodes)]

    @property
    def adapter(self) -> IntArray:
        """`AdapterNode.index` of the adapter above."""
        return self._adapter[: len(self.nodes)]

    @property
    def is_adapter(self) -> BoolArray:
        """True where the row is an adapter, not a chunk."""
        return self._is_adapter[: len(self.nodes)]

    @property
    def copy(self) -> NDArray[np.int8]:
        """Nearest tier further away where the bytes are READY too, or NO_COPY."""
        return self._copy[: len(self.nodes)]

    @property
    def weights(self) -> FloatArray:
        """`Node.weight`."""
        return self._weight[: len(self.nodes)]

    def visits(self, now: float) -> FloatArray:
        """Decayed visit counts at `now` (a new array)."""
        return self._weight[: len(self.nodes)] * self._clock.scale(now)

    def add(self, node: Node) -> None:
        """List `node`, which must not be listed in this tier."""
        node.rows = with_row(node.rows, self.tier, self._append(node))
        self.changes += 1

    def remove(self, node: Node) -> None:
        """Unlist `node`, which must be listed in this tier."""
        row = node.rows[self.tier]
        moved = self.nodes.pop()
        if moved is not node:
            self.nodes[row] = moved
            moved.rows = with_row(moved.rows, self.tier, row)
            last = len(self.nodes)
            for column in self._columns():
                column[row] = column[last]
        node.rows = with_row(node.rows, self.tier, NOT_LISTED)
        self.changes += 1

    def update(self, node: Node) -> None:
        """Copy the facts of a listed node again."""
        self._write(node.rows[self.tier], node)
        self.changes += 1

    def touched(self, node: Node) -> None:
        """Copy the use of a listed node again."""
        row = node.rows[self.tier]
        run = node.run
        self._last[row] = run.last_use
        self._weight[row] = run.weight
        self.changes += 1

    def reload_weights(self) -> None:
        """Copy every node's weight again (the visit clock was rebased)."""
        for row, node in enumerate(self.nodes):
            self._weight[row] = node.weight
        self.changes += 1

    def fill(self, nodes: Iterable[Node]) -> None:
        """Make this a scratch table of `nodes`, not linked from them.

        For scoring nodes that are not leaves yet with the same vectorised function.
        """
        self.nodes.clear()
        for node in nodes:
            self._append(node)

    def clear(self) -> None:
        """Unlist every node."""
        for node in self.nodes:
            node.rows = with_row(node.rows, self.tier, NOT_LISTED)
        self.nodes.clear()
        self.changes += 1

    def _append(self, node: Node) -> int:
        row = len(self.nodes)
        if row == len(self._last):
            self._grow()
        self.nodes.append(node)
        self._write(row, node)
        return row

    def _write(self, row: int, node: Node) -> None:
        run = node.run
        self._last[row] = run.last_use
        self._weight[row] = run.weight
        self._nbytes[row] = run.nbytes
        self._seq[row] = run.seq
        self._adapter[row] = -1 if run.adapter is None else run.adapter.index
        self._is_adapter[row] = node.kind is NodeKind.ADAPTER
        self._copy[row] = next_copy(node, self.tier)

    def _columns(self) -> tuple[NDArray[np.generic], ...]:
        return (
            self._last,
            self._weight,
            self._nbytes,
            self._seq,
            self._adapter,
            self._is_adapter,
            self._copy,
        )

    def _grow(self) -> None:
        # New arrays, not resize(): views that a policy still holds stay valid.
        self._last = np.concatenate((self._last, np.empty_like(self._last)))
        self._weight = np.concatenate((self._weight, np.empty_like(self._weight)))
        self._nbytes = np.concatenate((self._nbytes, np.empty_like(self._nbytes)))
        self._seq = np.concatenate((self._seq, np.empty_like(self._seq)))
        self._adapter = np.concatenate((self._adapter, np.empty_like(self._adapter)))
        self._is_adapter = np.concatenate((self._is_adapter, np.empty_like(self._is_adapter)))
        self._copy = np.concatenate((self._copy, np.empty_like(self._copy)))


def next_copy(node: Node, tier: Tier) -> int:
    """Nearest tier beyond `tier` where `node` is READY, or NO_COPY."""
    for further in range(tier + 1, len(node.state)):
        if node.state[further] is _READY:
            return further
    return NO_COPY
