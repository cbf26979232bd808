"""The ledger's adapters as nodes of the dependency tree.

Residency follows the ledger: PENDING from the grant on, READY when all ranks reported,
ABSENT from the moment an adapter was told to go.  An adapter whose content was never seen
has no identity and so no node; its first load appears when it is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from elora_connector.core.adapter_places import Entry
from elora_connector.core.ledger import AdapterLedger
from elora_connector.core.node import AdapterNode, NodeKind
from elora_connector.core.policy import EvictionPolicy
from elora_connector.core.policy_scores import Scores
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import Residency, Tier
from elora_connector.errors import InvariantError

_PLACES: Final = (Tier.GPU, Tier.HOST)

MakeRoom = Callable[[int, Sequence[AdapterNode], float], "list[AdapterNode] | None"]
"""(bytes, adapters that may go, now) -> which of them must; None: there is no way."""


class AdapterNodes:
    """A `PlaceListener` that keeps the nodes, and a `VictimChooser` that ranks them.

    Args:
        policy: gives the scores; the lowest leaves first.

    Attributes:
        now: time of the action under way, seconds; nodes made by it are this old.
        make_bytes, free_bytes: make room in the host budget; what is free of it.
        moved: bytes that entered ("in") and left ("out") each tier.
    """

    def __init__(self, tree: DependencyTree, policy: EvictionPolicy) -> None:
        self.now = 0.0
        self.make_bytes: MakeRoom | None = None
        self.free_bytes: Callable[[], int] | None = None
        self.moved: Counter[tuple[str, Tier]] = Counter()
        self._tree = tree
        self._scores = Scores(tree, policy, Tier.GPU)
        self._nodes: dict[int, AdapterNode] = {}
        self._ids: dict[AdapterNode, dict[int, tuple[Residency, Residency]]] = {}
        self._largest = 0

    def node(self, lora_id: int) -> AdapterNode | None:
        """The node of an adapter whose content is, or was, known."""
        return self._nodes.get(lora_id)

    def touch(self, lora_id: int, now: float) -> None:
        """A request uses the adapter."""
        node = self._nodes.get(lora_id)
        if node is not None:
            self._tree.touch((node,), now)

    def ids_of(self, node: AdapterNode) -> list[int]:
        """Ids under which the adapter is in host memory."""
        places = self._ids.get(node, {})
        return [i for i, place in places.items() if place[Tier.HOST]]

    # ---- PlaceListener -----------------------------------------------------------

    def placed(self, entry: Entry) -> None:
        """Bring the node of `entry` to where the ledger says it is."""
        if entry.known is None:
            return
        node = self._tree.adapter(entry.known, self.now)
        before = self._nodes.get(entry.lora_id)
        if before is not node and before is not None:
            self._unbind(entry.lora_id, before)
        if before is not node:
            self._nodes[entry.lora_id] = node
            self._tree.keep(node)
        if entry.nbytes and entry.nbytes != node.nbytes:
            self._tree.resize(node, entry.nbytes)
            self._largest = max(self._largest, entry.nbytes)
        self._ids.setdefault(node, {})[entry.lora_id] = entry.residency()
        self._settle(node)

    def forgotten(self, entry: Entry) -> None:
        """The adapter is nowhere and nobody asks for it."""
        node = self._nodes.pop(entry.lora_id, None)
        if node is not None:
            self._unbind(entry.lora_id, node)

    def _unbind(self, lora_id: int, node: AdapterNode) -> None:
        ids = self._ids[node]
        del ids[lora_id]
        self._settle(node)
        self._tree.unkeep(node)
        if not ids:
            del self._ids[node]
            self._tree.forget_if_unused(node)

    def _settle(self, node: AdapterNode) -> None:
        """Two ids of one content share a node: it is as far as the further one."""
        places = self._ids[node].values()
        for tier in _PLACES:
            wanted = max((place[tier] for place in places), default=Residency.ABSENT)
            if node.state[tier] is not wanted:
                self._move(node, tier, wanted)

    def _move(self, node: AdapterNode, tier: Tier, wanted: Residency) -> None:
        if wanted is Residency.READY:
            self._tree.set_ready(node, tier)
            self.moved["in", tier] += node.nbytes
            return
        if node.ready(tier):
            self.moved["out", tier] += node.nbytes
        if tier is Tier.GPU and node.counts[tier]:
            # vLLM's blocks are no hit any more; that is a fact, whatever they were to us.
            for below in self._tree.descendants(node):
                self._tree.set_absent(below, tier)
        self._tree.set_absent(node, tier)
        if wanted is Residency.PENDING:
            self._tree.set_pending(node, tier)

    # ---- VictimChooser -----------------------------------------------------------

    def rank(self, lora_ids: Sequence[int], now: float) -> list[int]:
        """Lowest score first; without those whose KV a copy is reading or writing.

        One adapter makes room for another here, so a policy's floor (+inf) only ranks last.
        """
        unknown = [i for i in lora_ids if i not in self._nodes]
        known = [i for i in lora_ids if i in self._nodes and not self._nodes[i].pins]
        scores = self._scores.of([self._nodes[i] for i in known], now)
        order = sorted(range(len(known)), key=lambda k: (scores[k], self._nodes[known[k]].last_use))
        return unknown + [known[k] for k in order]

    def has_room(self, lora_id: int) -> bool:
        """Do the adapter's bytes fit beside what is there?"""
        return self.free_bytes is None or self.free_bytes() >= self.nbytes(lora_id)

    def make_room(
        self, lora_id: int, leaving: Sequence[int], spare: Sequence[int], now: float
    ) -> tuple[int, ...] | None:
        """Room for an adapter's bytes, as far as they are known."""
        if self.make_bytes is None:
            return ()
        need = self.nbytes(lora_id) - sum(self.nbytes(i) for i in leaving)
        free_to_go = [i for i in spare if i in self._nodes and not self._nodes[i].pins]
        gone = self.make_bytes(need, [self._nodes[i] for i in free_to_go], now)
        if gone is not None:
            return tuple(i for i in free_to_go if self._nodes[i] in gone)
        # Policy or pinned KV leave no room.  One for another of its size is always right.
        exchanged: list[int] = []
        for i in free_to_go:
            if need <= 0:
                break
            exchanged.append(i)
            need -= self.nbytes(i)
        return tuple(exchanged) if need <= 0 else None

    def nbytes(self, lora_id: int) -> int:
        """Size of the weights; as large as the largest known ones where nothing is known."""
        node = self._nodes.get(lora_id)
        return self._largest if node is None else node.nbytes


class LedgerAdapters:
    """The ledger's side of the host budget (`SpareAdapters`)."""

    def __init__(self, tree: DependencyTree, ledger: AdapterLedger, nodes: AdapterNodes) -> None:
        self._tree = tree
        self._ledger = ledger
        self._nodes = nodes

    def spare(self, now: float) -> list[AdapterNode]:
        """The least valuable of those nobody needs; a slot's worth of adapters stays."""
        places, taken = self._ledger.places, self._ledger.taken()
        beyond = places.hosted - places.slots
        if beyond <= 0:
            return []
        ids = [e.lora_id for e in places if e.known and places.may_leave_host(e, taken)]
        found = [self._nodes.node(i) for i in self._nodes.rank(ids, now)[:beyond]]
        return [node for node in found if node is not None]

    def may_go(self, node: AdapterNode) -> bool:
        """The same for one that was spare a moment ago."""
        places, taken = self._ledger.places, self._ledger.taken()
        beyond = self._tree.num_resident(Tier.HOST, NodeKind.ADAPTER) - places.slots
        ids = self._nodes.ids_of(node)
        return (
            beyond > 0
            and not node.pins
            and bool(ids)
            and all(places.may_leave_host(places[i], taken) for i in ids)
        )

    def evict(self, nodes: Sequence[AdapterNode]) -> None:
        """All ids of these contents leave the host cache."""
        self._ledger.evict(i for node in nodes for i in self._nodes.ids_of(node))


def check_nodes(tree: DependencyTree, ledger: AdapterLedger, nodes: AdapterNodes) -> None:
    """Raise unless every adapter node is in the tiers where the ledger has it (I1, I4, I6).

    Raises:
        InvariantError: an adapter is elsewhere, or is resident for nobody.
    """
    expected: dict[AdapterNode, list[Residency]] = {}
    for entry in ledger.places:
        node = nodes.node(entry.lora_id)
        if node is None:
            if entry.known is not None:
                raise InvariantError(f"I6: adapter {entry.known} of id {entry.lora_id} has no node")
            continue
        if node.identity != entry.known or tree.find_adapter(node.identity) is not node:
            raise InvariantError(f"I1: {node!r} stands for {entry.known} of id {entry.lora_id}")
        if entry.in_host and node.nbytes != entry.nbytes:
            raise InvariantError(f"I4: {node!r} has {node.nbytes} bytes, reported {entry.nbytes}")
        places = expected.setdefault(node, [Residency.ABSENT] * len(_PLACES))
        for tier, state in zip(_PLACES, entry.residency(), strict=True):
            places[tier] = max(places[tier], state)
    for node in tree.adapters:
        there = [node.state[tier] for tier in _PLACES]
        if there != expected.get(node, [Residency.ABSENT] * len(_PLACES)):
            raise InvariantError(f"I1: {node!r} is not where the ledger has it")
