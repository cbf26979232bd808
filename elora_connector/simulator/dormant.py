"""KV in GPU slots' shadow: blocks of adapters that lost their slot, as invariant I7 has them.

vLLM's blocks stay what they are when an adapter leaves its slot: they are no hit while it
is away, are reused before anything else, in the order in which they were freed, and are
hits again if the adapter is back before that.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from elora_connector.core.node import AdapterNode, Node
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import ChunkKey, Identity, Tier


@dataclass(frozen=True, slots=True)
class _Chunk:
    key: ChunkKey
    parent: ChunkKey | None
    nbytes: int


class DormantKv:
    """A `SlotListener`: takes over the chunks of an adapter that leaves.

    Args:
        identities: of all adapters, by name.

    Attributes:
        nbytes: bytes of all dormant chunks.
        reused: chunks whose room was given to others.
    """

    def __init__(self, tree: DependencyTree, identities: Mapping[str, Identity]) -> None:
        self.nbytes = 0
        self.reused = 0
        self._tree = tree
        self._identities = identities
        self._chunks: dict[str, dict[ChunkKey, _Chunk]] = {}
        self._freed: list[tuple[float, int, str, ChunkKey]] = []
        self._count = 0

    def __len__(self) -> int:
        return sum(map(len, self._chunks.values()))

    # ---- SlotListener --------------------------------------------------------------------

    def slot_left(self, name: str) -> None:
        """Its chunks are about to leave the tree's GPU tier."""
        adapter = self._tree.find_adapter(self._identities[name])
        if adapter is None or not adapter.counts[Tier.GPU]:
            return
        chunks = self._chunks.setdefault(name, {})
        # Children first: of chunks freed together they are reused first.
        for node in self._tree.descendants(adapter):
            if node.ready(Tier.GPU):
                above = node.parent
                parent = None if above is None or above is adapter else above.key
                chunks[node.key] = _Chunk(node.key, parent, node.nbytes)
                self._count += 1
                heapq.heappush(self._freed, (node.last_use, self._count, name, node.key))
                self.nbytes += node.nbytes

    def slot_taken(self, name: str) -> None:
        """Nothing yet: its weights are only on their way."""

    # ---- memory --------------------------------------------------------------------------

    def revive(self, adapter: AdapterNode, now: float) -> None:
        """The adapter is back: what is left of its chunks can be hit again."""
        chunks = self._chunks.pop(adapter.identity.name, None)
        if chunks is None:
            return
        tree = self._tree
        for chunk in reversed(list(chunks.values())):  # parents first
            self.nbytes -= chunk.nbytes
            parent: Node | None = adapter if chunk.parent is None else tree.find(chunk.parent)
            if parent is not None and parent.ready(Tier.GPU):
                tree.set_ready(tree.add(parent, chunk.key, now), Tier.GPU)

    def give_up(self, nbytes: int) -> None:
        """Free `nbytes`, or all there are."""
        until = self.nbytes - nbytes
        while self.nbytes > max(0, until):
            _, _, name, key = heapq.heappop(self._freed)
            chunk = self._chunks.get(name, {}).pop(key, None)
            if chunk is not None:
                self.nbytes -= chunk.nbytes
                self.reused += 1
                if not self._chunks[name]:
                    del self._chunks[name]

    def recount(self) -> int:
        """Bytes, from the chunks themselves."""
        return sum(c.nbytes for chunks in self._chunks.values() for c in chunks.values())
