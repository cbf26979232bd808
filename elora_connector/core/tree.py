"""The usage-dependency tree: virtual root -> adapters -> chunks.

The tree records where bytes are and keeps every count that a decision needs, so
that nothing is ever searched for.  It breaks a rule of the caller's with
`InvariantError` before anything changed; it decides nothing itself.

Prepare (`add`, `set_pending`), move the bytes, then publish (`set_ready`) or roll
back (`set_absent`).  One thread owns a tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from elora_connector.core.leaves import LeafTable, VisitClock
from elora_connector.core.node import (
    NO_COUNTS,
    NO_PLACE,
    NO_SLOT,
    PINS,
    TIERS,
    UNLISTED,
    AdapterNode,
    Node,
    NodeKind,
    Run,
    place_of,
    with_count,
    with_state,
)
from elora_connector.core.types import BASE, ChunkKey, Identity, Residency, Tier
from elora_connector.errors import InvariantError

# Module names: an enum member looked up through its class costs several times more.
_ABSENT: Final = Residency.ABSENT
_PENDING: Final = Residency.PENDING
_READY: Final = Residency.READY
_GPU: Final = Tier.GPU
_HOST: Final = Tier.HOST
_REMOTE: Final = Tier.REMOTE
_CHUNK: Final = NodeKind.CHUNK


class DependencyTree:
    """Residency, use and dependencies of adapters and chunks.

    Args:
        chunk_nbytes: default size of a chunk over one rank.
        visit_decay_s: time constant of the decayed visit counts; inf counts visits.
        visit_turnovers: see `VisitClock`.
        visit_prior: visits that a new node is taken to have had, or as many as its siblings
            had on average if that is more, though never more than its parent had.
        dependency_rule: false is for experiments: any READY node may leave a tier, also
            below or above others.  A chunk behind a gap is then *stranded*: it keeps its
            place but no look-up reaches it, until the gap is filled again.
    """

    def __init__(
        self,
        chunk_nbytes: int = 0,
        visit_decay_s: float = math.inf,
        visit_prior: float = 0.0,
        *,
        visit_turnovers: float = math.inf,
        dependency_rule: bool = True,
    ) -> None:
        if not visit_prior >= 0:
            raise ValueError(f"visit_prior must not be negative, got {visit_prior}")
        self.chunk_nbytes = chunk_nbytes
        self.visit_prior = visit_prior
        self.dependency_rule = dependency_rule
        self.clock = VisitClock(visit_decay_s, visit_turnovers)
        self.adapter_changes = 0
        """Raised when an adapter came, went, or changed its residency or size."""
        self.leaves: tuple[LeafTable, ...] = tuple(LeafTable(t, self.clock) for t in TIERS)
        self._seq = 0
        self._next_adapter = 0
        self._clear()

    def _clear(self) -> None:
        self.root = Node(ChunkKey(b""), None, Run(None, -1, 0, 0.0, 0.0))
        self._newest: Node = self.root
        self._adapters: dict[Identity, AdapterNode] = {}
        self._index: dict[ChunkKey, Node] = {}
        self._used = [[0] * len(TIERS) for _ in NodeKind]
        self._resident = [[0] * len(TIERS) for _ in NodeKind]
        self._pinned = 0

    # Reading

    def __len__(self) -> int:
        """Number of chunk nodes."""
        return len(self._index)

    @property
    def adapters(self) -> Iterator[AdapterNode]:
        """All adapter nodes, oldest first."""
        return iter(self._adapters.values())

    @property
    def chunks(self) -> Iterator[Node]:
        """All chunk nodes, oldest first."""
        return iter(self._index.values())

    @property
    def pinned(self) -> int:
        """Number of nodes with at least one pin."""
        return self._pinned

    def find_adapter(self, identity: Identity) -> AdapterNode | None:
        """The node of `identity`, if there is one."""
        return self._adapters.get(identity)

    def find(self, key: ChunkKey) -> Node | None:
        """The chunk node of `key`, if there is one."""
        return self._index.get(key)

    def match(self, keys: Sequence[ChunkKey], tier: Tier) -> int:
        """How many of `keys`, counted from the first, are READY in `tier`."""
        get = self._index.get
        count = 0
        for key in keys:
            node = get(key)
            if node is None or node.state[tier] is not _READY:
                break
            count += 1
        return count

    def nodes(self, keys: Sequence[ChunkKey]) -> list[Node]:
        """The nodes of `keys`, counted from the first, up to the first that has none."""
        get = self._index.get
        found: list[Node] = []
        for key in keys:
            node = get(key)
            if node is None:
                break
            found.append(node)
        return found

    def used_bytes(self, tier: Tier, kind: NodeKind | None = None) -> int:
        """Bytes of nodes PENDING or READY in `tier`, of one kind or both (I4)."""
        if kind is None:
            return sum(used[tier] for used in self._used)
        return self._used[kind][tier]

    def num_resident(self, tier: Tier, kind: NodeKind | None = None) -> int:
        """Nodes PENDING or READY in `tier`, of one kind or both."""
        if kind is None:
            return sum(counts[tier] for counts in self._resident)
        return self._resident[kind][tier]

    def stranded(self, tier: Tier) -> int:
        """READY chunks of `tier` that no look-up reaches; linear in the tree.

        None while the dependency rule holds.
        """
        if self.dependency_rule:
            return 0
        reached, stack = 0, [c for a in self._adapters.values() for c in a.each_child()]
        while stack:
            node = stack.pop()
            if node.state[tier] is _READY:
                reached += 1
                stack.extend(node.each_child())
        ready = sum(node.state[tier] is _READY for node in self._index.values())
        return ready - reached

    def visits(self, node: Node, now: float) -> float:
        """Decayed visit count of a node."""
        return node.weight * self.clock.scale(now)

    def descendants(self, node: Node) -> list[Node]:
        """All nodes below `node`, children before parents, as a list of its own."""
        order: list[Node] = []
        stack = [node]
        while stack:
            below = list(stack.pop().each_child())
            order.extend(below)
            stack.extend(below)
        order.reverse()
        return order

    # Nodes

    def adapter(self, identity: Identity, now: float, nbytes: int = 0) -> AdapterNode:
        """Get or create an adapter's node; `nbytes` counts only on creation (see `resize`)."""
        node = self._adapters.get(identity)
        if node is None:
            node = AdapterNode(
                identity,
                self.root,
                index=self._next_adapter,
                always_resident=identity == BASE,
                nbytes=nbytes,
                seq=self._take_seq(),
                now=now,
                weight=self._first_weight(now),
            )
            self._next_adapter += 1
            self._adapters[identity] = node
            self.adapter_changes += 1
        return node

    def forget_adapter(self, node: AdapterNode) -> None:
        """Remove an adapter that has no chunks, residency or pins and nobody keeps.

        Raises:
            InvariantError: it has some; nothing changed.
        """
        self._require_attached(node)
        if _in_use(node):
            raise InvariantError(f"I1: {node!r} is in use and cannot be forgotten")
        del self._adapters[node.identity]
        node.parent = None
        self.adapter_changes += 1

    def keep(self, node: AdapterNode) -> None:
        """Remember an adapter that is nowhere until as many `unkeep`."""
        self._require_attached(node)
        node.kept += 1

    def unkeep(self, node: AdapterNode) -> None:
        """Undo one `keep`; forgets the adapter if it is unused."""
        node.kept -= 1
        self.forget_if_unused(node)

    def forget_if_unused(self, node: AdapterNode) -> None:
        """`forget_adapter`, unless it has chunks, residency or pins, or is to be kept."""
        if not _in_use(node) and node.attached:
            self.forget_adapter(node)

    def add(self, parent: Node, key: ChunkKey, now: float, nbytes: int | None = None) -> Node:
        """Get or create the chunk `key` under `parent`, ABSENT in every tier.

        A new node is to be made resident, pinned or handed to `prune`.

        Raises:
            InvariantError: the chunk exists under another parent, or `parent` left the tree.
        """
        node = self._index.get(key)
        if node is not None:
            if node.parent is not parent:
                raise InvariantError(f"I1: {node!r} exists under another parent than {parent!r}")
            return node
        self._require_attached(parent)
        size = self.chunk_nbytes if nbytes is None else nbytes
        node = Node(key, parent, self._newborn_run(parent, size, now))
        self._index[key] = self._newest = node
        parent.adopt(node)
        return node

    def prune(self, node: Node) -> int:
        """Remove `node`, and then its parents, as far as they are unused chunks.

        Unused: ABSENT in every tier, without children and pins.  Returns how many went.
        """
        count = 0
        while node.kind is _CHUNK and node.parent is not None and _unused(node):
            parent = node.parent
            parent.disown(node)
            del self._index[node.key]
            node.parent = None
            node = parent
            count += 1
        return count

    def resize(self, node: Node, nbytes: int) -> None:
        """Correct a node's size (an adapter's is known only after its load)."""
        self._require_attached(node)
        for tier in TIERS:
            if node.resident(tier):
                self._used[node.kind][tier] += nbytes - node.nbytes
        node.run = node.run.resized(nbytes)
        self._update_rows(node)
        if node.kind is not _CHUNK:
            self.adapter_changes += 1

    def reset(self) -> None:
        """Drop everything.  Nodes that jobs still hold become detached."""
        for node in (*self._index.values(), *self._adapters.values()):
            node.parent = None
            node.disown_all()
        for table in self.leaves:
            table.clear()
        self._clear()
        self.adapter_changes += 1

    def drop_chunks(self) -> None:
        """Drop every chunk.  Adapters stay where they are: their weights were not touched.

        All counts are made anew, so this also mends a tree that was found inconsistent.
        """
        adapters = list(self._adapters.values())
        for adapter in adapters:
            adapter.disown_all()
            adapter.counts = with_count(NO_COUNTS, PINS, adapter.pins)
        staying = [adapter for adapter in adapters if _in_use(adapter)]
        self.reset()
        for adapter in staying:
            self._adapters[adapter.identity] = adapter
            adapter.parent = self.root
            self._pinned += adapter.pins > 0
            for tier in TIERS:
                if adapter.resident(tier):
                    self._used[adapter.kind][tier] += adapter.nbytes
                    self._resident[adapter.kind][tier] += 1
                    self._count_child(self.root, tier, 1)
                self._list_if_leaf(adapter, tier)

    # Residency

    def set_pending(self, node: Node, tier: Tier, slot: int = NO_SLOT, generation: int = 0) -> None:
        """ABSENT -> PENDING: room is reserved, a job will bring the bytes.

        `slot` and `generation` are the place in the host buffer, for the host tier only.

        Raises:
            InvariantError: not ABSENT, or (I1) the parent is not resident in gpu or host.
        """
        self._require_attached(node)
        if slot != NO_SLOT and tier is not _HOST:
            raise ValueError(f"only the host tier has slots, got slot {slot} for {tier.name}")
        if node.state[tier] is not _ABSENT:
            raise InvariantError(f"I5: {node!r} cannot become PENDING in {tier.name}")
        self._require_parent(node, tier, _PENDING)
        if tier is _HOST:
            node.place = place_of(slot, generation)
        self._enter(node, tier, _PENDING)

    def set_ready(self, node: Node, tier: Tier) -> None:
        """PENDING -> READY: the bytes are there; READY again is no change.

        From ABSENT too where no slot is involved (gpu, remote, adapters): the caller
        learns of the bytes after the fact.

        Raises:
            InvariantError: (I1) the parent is not READY in gpu or host, or a host chunk
                was not PENDING.
        """
        self._require_attached(node)
        state = node.state[tier]
        if state is _READY:
            return
        self._require_parent(node, tier, _READY)
        if state is _PENDING:
            node.state = with_state(node.state, tier, _READY)
            self._moved(node)
        elif tier is _HOST and node.kind is _CHUNK:
            raise InvariantError(f"I5: {node!r} was not prepared in HOST")
        else:
            self._enter(node, tier, _READY)
        self._list_if_leaf(node, tier)

    def set_absent(self, node: Node, tier: Tier) -> None:
        """Evicted, or a job rolled back; ABSENT already is no change.  Prunes.

        Raises:
            InvariantError: (I1) a child is resident in gpu or host, or (I2) a READY host
                chunk is pinned.  That vLLM took GPU blocks or an adapter is a fact, not
                our decision, so pins do not hold there.
        """
        self._require_attached(node)
        if node.state[tier] is _ABSENT:
            return
        self._require_evictable(node, tier)
        self._unlist(node, tier)
        node.state = with_state(node.state, tier, _ABSENT)
        self._moved(node)
        if tier is _HOST:
            node.place = NO_PLACE
        self._used[node.kind][tier] -= node.nbytes
        self._resident[node.kind][tier] -= 1
        parent = self._require_attached(node)
        self._count_child(parent, tier, -1)
        self._list_if_leaf(parent, tier)
        self.prune(node)

    def _enter(self, node: Node, tier: Tier, state: Residency) -> None:
        node.state = with_state(node.state, tier, state)
        self._moved(node)
        self._used[node.kind][tier] += node.nbytes
        self._resident[node.kind][tier] += 1
        parent = self._require_attached(node)
        self._count_child(parent, tier, 1)
        if self.dependency_rule:
            self._unlist(parent, tier)

    @staticmethod
    def _count_child(parent: Node, tier: Tier, change: int) -> None:
        parent.counts = with_count(parent.counts, tier, change)

    def _moved(self, node: Node) -> None:
        """A residency changed: rows in other tiers' tables say where else the bytes are."""
        if node.kind is not _CHUNK:
            self.adapter_changes += 1
        if node.rows is not UNLISTED:
            self._update_rows(node)

    # Use

    def pin(self, node: Node) -> None:
        """Protect from eviction and pruning until as many `unpin`."""
        self._require_attached(node)
        node.counts = with_count(node.counts, PINS, 1)
        if node.pins == 1:
            self._pinned += 1
            for tier in TIERS:
                self._unlist(node, tier)

    def unpin(self, node: Node) -> None:
        """Undo one `pin`; prunes.  Works on a node that a reset detached.

        Raises:
            InvariantError: the node is not pinned.
        """
        if not node.pins:
            raise InvariantError(f"I2: {node!r} is not pinned")
        node.counts = with_count(node.counts, PINS, -1)
        if node.pins or not node.attached:
            return
        self._pinned -= 1
        for tier in TIERS:
            self._list_if_leaf(node, tier)
        self.prune(node)

    def touch(self, nodes: Iterable[Node], now: float) -> None:
        """Count a visit of each node at `now`.

        Pass the whole path, adapter first: a parent that is visited less often than its
        child would be ranked below it.
        """
        gain = self._gain(now)
        before: Run | None = None
        after = self.root.run
        for node in nodes:
            if node.run is not before:
                before = node.run
                after = before.used(now, gain)
            node.run = after
            if node.rows is not UNLISTED:
                for table in self.leaves:
                    if node.rows[table.tier] >= 0:
                        table.touched(node)

    def _gain(self, now: float) -> float:
        if self.clock.exponent(now) > self.clock.MAX_EXPONENT:
            self._rebase(now)
        return self.clock.gain(now)

    def _first_weight(self, now: float) -> float:
        return self.visit_prior * self._gain(now) if self.visit_prior else 0.0

    def _newborn_run(self, parent: Node, nbytes: int, now: float) -> Run:
        """A new child's run: its parent's if that was the last node made, and is as new.

        Then the run is a chain, of which only the lowest can be chosen: no number is needed
        to order them.  Without the dependency rule it is.
        """
        weight = self._newborn_weight(parent, now)
        run = parent.run
        alike = (run.last_use, run.weight, run.nbytes) == (now, weight, nbytes)
        if alike and parent is self._newest and parent.kind is _CHUNK and self.dependency_rule:
            return run
        return Run(run.adapter, self._take_seq(), nbytes, now, weight)

    def _newborn_weight(self, parent: Node, now: float) -> float:
        """A new chunk goes on where its parent is used: expect its share of those visits.

        With a bare prior the newest turn of every live conversation would go before the
        old turns of dead ones.  Never above the parent: Eval must not rise along a path.
        """
        weight = self._first_weight(now)
        if weight and parent.kind is _CHUNK:
            weight = max(weight, parent.weight / (parent.num_children + 1))
        return min(weight, parent.weight)

    def _rebase(self, now: float) -> None:
        scale = self.clock.scale(now)
        self.clock.rebase(now)
        runs: dict[Run, Run] = {}
        for node in (*self._index.values(), *self._adapters.values()):
            run = runs.get(node.run)
            if run is None:
                run = runs[node.run] = node.run.scaled(scale)
            node.run = run
        for table in self.leaves:
            table.reload_weights()

    def _update_rows(self, node: Node) -> None:
        for tier in TIERS:
            if node.rows[tier] >= 0:
                self.leaves[tier].update(node)

    # Rules

    def _take_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _list_if_leaf(self, node: Node, tier: Tier) -> None:
        if (
            node.state[tier] is _READY
            and not node.counts[PINS]
            and node.rows[tier] < 0
            and not (self.dependency_rule and node.counts[tier])
        ):
            self.leaves[tier].add(node)

    def _unlist(self, node: Node, tier: Tier) -> None:
        if node.rows[tier] >= 0:
            self.leaves[tier].remove(node)

    def _require_attached(self, node: Node) -> Node:
        """The parent, which every node of the tree has."""
        if node.parent is None:
            raise InvariantError(f"I1: {node!r} is not in the tree")
        return node.parent

    def _require_parent(self, node: Node, tier: Tier, state: Residency) -> None:
        """I1 upwards: the parent is at least as far in this tier as the node will be."""
        parent = self._require_attached(node)
        if not self.dependency_rule:
            return
        if needs_parent(node, tier) and parent.state[tier] < state:
            raise InvariantError(
                f"I1: {node!r} cannot become {state.name} in {tier.name} under {parent!r}"
            )

    def _require_evictable(self, node: Node, tier: Tier) -> None:
        """I1 downwards, and no eviction under a reader."""
        orphans = self.dependency_rule and node.counts[tier]
        if orphans and needs_to_stay(node, tier):
            raise InvariantError(f"I1: {node!r} has resident children in {tier.name}")
        if node.kind is _CHUNK and tier is _HOST and node.pins and node.state[tier] is _READY:
            raise InvariantError(f"I2: {node!r} is pinned in {tier.name}")


def needs_parent(node: Node, tier: Tier) -> bool:
    """Whether I1 ties the node's residency in `tier` to its parent's.

    A remote residency is a hint.  A host chunk needs its adapter known, not loaded; a GPU
    chunk needs it in a slot, unless it is the base model.
    """
    if tier is _REMOTE or node.kind is not _CHUNK:
        return False
    parent = node.parent
    if not isinstance(parent, AdapterNode):
        return True
    return tier is _GPU and not parent.always_resident


def needs_to_stay(node: Node, tier: Tier) -> bool:
    """Whether I1 keeps a node in `tier` while a child is resident there."""
    if tier is _REMOTE:
        return False
    if not isinstance(node, AdapterNode):
        return True
    return tier is _GPU and not node.always_resident


def _in_use(adapter: AdapterNode) -> bool:
    return bool(
        adapter.has_children or adapter.pins or adapter.kept or any(map(adapter.resident, TIERS))
    )


def _unused(node: Node) -> bool:
    return (
        not node.has_children
        and not node.pins
        and node.state[_GPU] is _ABSENT
        and node.state[_HOST] is _ABSENT
        and node.state[_REMOTE] is _ABSENT
    )
