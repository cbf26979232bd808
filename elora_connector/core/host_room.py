"""Room in the host tier: KV chunks and adapter weights share one budget.

Plans only; who is named leaves afterwards, by the manager (chunks) and by an order of
the ledger (adapters).  All of the room that is asked for, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from elora_connector.core.node import AdapterNode, Node, NodeKind
from elora_connector.core.policy import EvictionPolicy
from elora_connector.core.policy_scores import Scores
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import Tier
from elora_connector.core.victims import VictimQueue


class SpareAdapters(Protocol):
    """Adapters whose host memory may go to KV."""

    def spare(self, now: float) -> Sequence[AdapterNode]:
        """Those that may leave vLLM's host cache now, all of them together."""
        ...

    def may_go(self, node: AdapterNode) -> bool:
        """May one that `spare` named a moment ago still leave?"""
        ...

    def evict(self, nodes: Sequence[AdapterNode]) -> None:
        """Order them out; they count as gone at once."""
        ...


class NoAdapters:
    """Without LoRA, or before a ledger is there."""

    def spare(self, now: float) -> Sequence[AdapterNode]:
        return ()

    def may_go(self, node: AdapterNode) -> bool:
        return False

    def evict(self, nodes: Sequence[AdapterNode]) -> None:
        raise AssertionError("there are no adapters to evict")


_Scored = tuple[float, AdapterNode]
_MAX_AGE_S: Final = 0.1


class HostRoom:
    """The host tier's budget.

    Args:
        chunks: chooses among chunks of the host tier.
        budget: bytes of one rank for chunks and adapter weights together.

    Attributes:
        adapters: whose memory may go to KV.
    """

    def __init__(self, tree: DependencyTree, chunks: VictimQueue, budget: int) -> None:
        self.budget = budget
        self.adapters: SpareAdapters = NoAdapters()
        self._tree = tree
        self._chunks = chunks
        self._scores = Scores(tree, chunks.policy, Tier.HOST)
        self._spare: list[_Scored] = []
        self._spare_at = -math.inf

    @property
    def policy(self) -> EvictionPolicy:
        """What chunks are worth."""
        return self._chunks.policy

    @property
    def free(self) -> int:
        """Bytes left; negative while adapters that must be there pass the budget."""
        return self.budget - self._tree.used_bytes(Tier.HOST)

    def for_chunks(self, count: int, free_slots: int, now: float) -> list[Node] | None:
        """Who leaves so that `count` chunks fit; None: there is no way."""
        size = self._tree.chunk_nbytes
        need = count * size - self.free
        if free_slots >= count:
            return self._from_spare(need, now)
        missing = max(count - free_slots, math.ceil(need / size) if size else 0)
        return self._chunks.select_count(missing, now) or None

    def for_bytes(self, nbytes: int, spare: Sequence[AdapterNode], now: float) -> list[Node] | None:
        """Who leaves so that `nbytes` more fit; only `spare` of the adapters."""
        return self._plan(nbytes - self.free, lambda: self._ranked(spare, now), now)

    def overdrawn(self, now: float) -> list[Node]:
        """Who leaves because weights turned out larger than the room they were given."""
        need = -self.free
        victims = self._from_spare(need, now)
        if victims is None:
            # Adapters that must stay pass the budget: then at least every chunk that may go.
            victims = self._chunks.select_count(1, now)
        return victims

    def _from_spare(self, need: int, now: float) -> list[Node] | None:
        plan = self._plan(need, lambda: self._spare_now(now), now)
        if plan and any(node.kind is NodeKind.ADAPTER for node in plan):
            # What was spare a moment ago may be needed by now.
            self._spare_at = -math.inf
            plan = self._plan(need, lambda: self._ranked(self.adapters.spare(now), now), now)
        return plan

    def _plan(self, need: int, spare: Callable[[], list[_Scored]], now: float) -> list[Node] | None:
        """`need` bytes from chunks and adapters, the lowest scores first."""
        if need <= 0:
            return []
        adapters = spare()
        for forced in range(len(adapters) + 1):
            # As few adapters as possible beyond those whose score asks for it.
            chosen: list[Node] = [node for _, node in adapters[:forced]]
            left = need - sum(node.nbytes for node in chosen)
            chunks = self._chunks.select_bytes(left, now)
            if left <= 0:
                return chosen
            if chunks:
                return chosen + self._merge(left, chunks, adapters[forced:], now)
        return None

    def _spare_now(self, now: float) -> list[_Scored]:
        """Scored anew at most every 100 ms; of the others only the least valuable is asked."""
        if not self._spare_at <= now < self._spare_at + _MAX_AGE_S:
            self._spare, self._spare_at = self._ranked(self.adapters.spare(now), now), now
        while self._spare and not self.adapters.may_go(self._spare[0][1]):
            del self._spare[0]
        return self._spare

    def _ranked(self, nodes: Sequence[AdapterNode], now: float) -> list[_Scored]:
        scores = self._scores.of(nodes, now)
        found = [(s, n) for s, n in zip(scores, nodes, strict=True) if s < math.inf and n.nbytes]
        return sorted(found, key=lambda pair: (pair[0], pair[1].seq))

    def _merge(
        self,
        need: int,
        chunks: list[Node],
        adapters: list[_Scored],
        now: float,
    ) -> list[Node]:
        """The two rows by ascending score, until `need` is met; chunks keep their order."""
        if not adapters:
            return chunks
        chosen: list[Node] = []
        rest = list(reversed(adapters))
        for score, chunk in zip(self._scores.of(chunks, now), chunks, strict=True):
            while need > 0 and rest and rest[-1][0] < score:
                chosen.append(rest.pop()[1])
                need -= chosen[-1].nbytes
            if need <= 0:
                break
            chosen.append(chunk)
            need -= chunk.nbytes
        return chosen


def split(nodes: Sequence[Node]) -> tuple[list[Node], list[AdapterNode]]:
    """Chunks and adapters of a plan, each in its order."""
    chunks = [node for node in nodes if node.kind is NodeKind.CHUNK]
    return chunks, [node for node in nodes if isinstance(node, AdapterNode)]
