"""GPU memory of a simulated engine: chunks of the tree, adapters, and requests' own blocks.

What leaves is chosen by the core's `VictimQueue` over the tree's GPU tier.
"""

from __future__ import annotations

from collections.abc import Iterable

from elora_connector.core.node import AdapterNode, Node, NodeKind
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import Tier
from elora_connector.core.victims import VictimQueue
from elora_connector.errors import InvariantError
from elora_connector.simulator.dormant import DormantKv


class GpuArea:
    """One pool of bytes on one rank.

    Args:
        tree: its GPU tier is what is here besides `private`.
        queue: chooses who leaves.
        capacity: bytes.
        unified: adapters are in this pool; else they have slots of their own.
        exchange: chooses the adapter that gives its place to another one, where adapters
            are in this pool.
        dormant: KV of adapters that lost their slot; None where such KV is just KV.

    Attributes:
        private: bytes of requests' blocks that are no chunk of the tree (yet).
        evicted: chunks that left.
        adapters_evicted: adapters that left.
    """

    def __init__(
        self,
        tree: DependencyTree,
        queue: VictimQueue,
        capacity: int,
        *,
        unified: bool,
        exchange: VictimQueue | None = None,
        dormant: DormantKv | None = None,
    ) -> None:
        self.capacity = capacity
        self.unified = unified
        self.private = 0
        self.evicted = 0
        self.adapters_evicted = 0
        self.dormant = dormant
        self._tree = tree
        self._queue = queue
        self._exchange = exchange
        self._kind = None if unified else NodeKind.CHUNK
        self._held: dict[Node, int] = {}
        self._held_bytes = [0, 0]

    @property
    def used(self) -> int:
        """Bytes in use."""
        used = self._tree.used_bytes(Tier.GPU, self._kind) + self.private
        return used if self.dormant is None else used + self.dormant.nbytes

    @property
    def in_use(self) -> int:
        """Bytes that requests and copies under way need now."""
        return sum(self._held_bytes) + self.private

    @property
    def kv_in_use(self) -> int:
        """The same without adapters."""
        return self._held_bytes[NodeKind.CHUNK] + self.private

    @property
    def kv(self) -> int:
        """Bytes of KV, in use or not."""
        kv = self._tree.used_bytes(Tier.GPU, NodeKind.CHUNK) + self.private
        return kv if self.dormant is None else kv + self.dormant.nbytes

    @property
    def available(self) -> int:
        """Bytes that are free or could be."""
        return self.capacity - self.in_use

    def holds(self, node: Node) -> bool:
        """Does anybody need `node` now?"""
        return node in self._held

    @property
    def held(self) -> dict[Node, int]:
        """Nodes that somebody needs -> how many do; to be read."""
        return self._held

    def hold(self, nodes: Iterable[Node]) -> None:
        """Keep nodes that are resident here until as many `drop`."""
        held = self._held
        for node in nodes:
            if node in held:
                held[node] += 1
            else:
                held[node] = 1
                self._held_bytes[node.kind] += node.nbytes

    def drop(self, nodes: Iterable[Node]) -> None:
        """Undo `hold`."""
        held = self._held
        for node in nodes:
            held[node] -= 1
            if not held[node]:
                del held[node]
                self._held_bytes[node.kind] -= node.nbytes

    def make_room(self, nbytes: int, now: float, *, for_adapter: bool = False) -> bool:
        """Free `nbytes`, all of them or nothing."""
        need = nbytes - (self.capacity - self.used)
        if need <= 0:
            return True
        if nbytes > self.available:
            return False
        if self.dormant is not None:
            self.dormant.give_up(need)
            need = nbytes - (self.capacity - self.used)
            if need <= 0:
                return True
        victims = self._queue.select_bytes(need, now, exclude=self._held)
        if not victims and for_adapter and self._exchange is not None:
            victims = self._exchange.select_bytes(need, now, exclude=self._held)
        for node in victims:
            self._tree.set_absent(node, Tier.GPU)
            if isinstance(node, AdapterNode):
                self.adapters_evicted += 1
            else:
                self.evicted += 1
        return bool(victims)

    def check(self, private: int, held: dict[Node, int]) -> None:
        """Raise unless the account is what requests and copies under way say.

        Raises:
            InvariantError: (I4) bytes were lost or made.
        """
        if private != self.private:
            raise InvariantError(f"I4: {self.private} private bytes, requests have {private}")
        if held != self._held:
            raise InvariantError("I4: nodes are held for nobody, or not held for somebody")
        nbytes = sum(node.nbytes for node in held)
        if nbytes != sum(self._held_bytes):
            raise InvariantError(f"I4: {self._held_bytes} bytes held, should be {nbytes}")
        if self.dormant is not None and self.dormant.nbytes != self.dormant.recount():
            raise InvariantError(f"I4: {self.dormant.nbytes} dormant bytes do not add up")
        if self.used > self.capacity:
            raise InvariantError(f"I4: {self.used} bytes in a pool of {self.capacity}")
        for node in held:
            if not node.resident(Tier.GPU) and not _needs_no_place(node):
                raise InvariantError(f"I1: {node!r} left under a reader")


def _needs_no_place(node: Node) -> bool:
    return isinstance(node, AdapterNode) and node.always_resident
