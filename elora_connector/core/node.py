"""Vertices of the dependency tree.  Fields are written by `tree.py` and `leaves.py` only.

There may be a million of them, so what most nodes have alike is shared: the triples of
residencies, child counts and rows are tuples out of a common store, and a node with one
child needs no dictionary for it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Final

from elora_connector.core.types import ChunkKey, Identity, Residency, Tier

NO_SLOT: Final = -1
NOT_LISTED: Final = -1
TIERS: Final = tuple(Tier)

States = tuple[Residency, Residency, Residency]
Triple = tuple[int, int, int]

UNLISTED: Final[Triple] = (NOT_LISTED, NOT_LISTED, NOT_LISTED)
"""`Node.rows` of a node in no LeafTable; always this very object."""

_STATES: Final[dict[States, States]] = {
    (g, h, r): (g, h, r) for g in Residency for h in Residency for r in Residency
}
_SMALL: Final = 4
_COUNTS: Final[dict[Triple, Triple]] = {
    (g, h, r): (g, h, r) for g in range(_SMALL) for h in range(_SMALL) for r in range(_SMALL)
}
_NOWHERE: Final[States] = _STATES[Residency.ABSENT, Residency.ABSENT, Residency.ABSENT]
NO_CHILDREN: Final[Triple] = _COUNTS[0, 0, 0]


def with_state(states: States, tier: Tier, state: Residency) -> States:
    """`states` with one tier changed, as the shared tuple."""
    gpu, host, remote = states
    if tier is Tier.HOST:
        return _STATES[gpu, state, remote]
    return _STATES[(state, host, remote) if tier is Tier.GPU else (gpu, host, state)]


def with_count(counts: Triple, tier: Tier, change: int) -> Triple:
    """`counts` with `change` added in one tier, shared while all are small."""
    gpu, host, remote = counts
    if tier is Tier.HOST:
        changed = gpu, host + change, remote
    elif tier is Tier.GPU:
        changed = gpu + change, host, remote
    else:
        changed = gpu, host, remote + change
    return _COUNTS.get(changed, changed)


def with_row(rows: Triple, tier: Tier, row: int) -> Triple:
    """`rows` with the row in one tier's table changed."""
    gpu, host, remote = rows
    if tier is Tier.HOST:
        changed = gpu, row, remote
    elif tier is Tier.GPU:
        changed = row, host, remote
    else:
        changed = gpu, host, row
    return UNLISTED if changed == UNLISTED else changed


class NodeKind(enum.IntEnum):
    """What a node's bytes are: an adapter's weights, or the KV of one chunk."""

    ADAPTER = 0
    CHUNK = 1


class Node:
    """One chunk, or (as `AdapterNode`) one adapter, or the virtual root.

    Attributes:
        key: chunk key; empty for an adapter and the root.
        parent: None for the root and for a node that left the tree.
        adapter: the adapter above (itself for an adapter, None for the root).
        nbytes: size over one rank, counted in every tier where the node is resident.
        state: residency per tier.
        resident_children: children PENDING or READY, per tier.
        rows: row in each tier's LeafTable, NOT_LISTED when it is in none.
        pins: eviction and pruning are off while positive.
        weight: visits in the inflated unit of `leaves.VisitClock`.
        last_use: time of the last touch (creation before the first one), seconds.
        seq: creation number, the tie-break between equal scores.
        slot, generation: place in the host buffer while resident there.
    """

    __slots__ = (
        "_children",
        "adapter",
        "generation",
        "key",
        "last_use",
        "nbytes",
        "parent",
        "pins",
        "resident_children",
        "rows",
        "seq",
        "slot",
        "state",
        "weight",
    )

    kind: NodeKind = NodeKind.CHUNK

    def __init__(
        self,
        key: ChunkKey,
        parent: Node | None,
        adapter: AdapterNode | None,
        *,
        nbytes: int,
        seq: int,
        now: float,
    ) -> None:
        self.key = key
        self.parent = parent
        self.adapter = adapter
        self.nbytes = nbytes
        self.seq = seq
        self.last_use = now
        self.weight = 0.0
        self.pins = 0
        self.slot = NO_SLOT
        self.generation = 0
        self.state = _NOWHERE
        self.resident_children = NO_CHILDREN
        self.rows = UNLISTED
        self._children: Node | dict[ChunkKey, Node] | None = None

    @property
    def children(self) -> Mapping[ChunkKey, Node]:
        """By chunk key; to be read, not changed."""
        below = self._children
        if below is None:
            return {}
        return {below.key: below} if isinstance(below, Node) else below

    def each_child(self) -> Iterator[Node]:
        """The children, oldest first."""
        below = self._children
        if isinstance(below, Node):
            return iter((below,))
        return iter(() if below is None else below.values())

    @property
    def has_children(self) -> bool:
        return bool(self._children)

    @property
    def num_children(self) -> int:
        below = self._children
        if isinstance(below, dict):
            return len(below)
        return 0 if below is None else 1

    def adopt(self, child: Node) -> None:
        """Take in a child that has this parent."""
        below = self._children
        if below is None:
            self._children = child
        elif isinstance(below, Node):
            self._children = {below.key: below, child.key: child}
        else:
            below[child.key] = child

    def disown(self, child: Node) -> None:
        """Let go of a child."""
        below = self._children
        if isinstance(below, dict):
            del below[child.key]
            if not below:
                self._children = None
        elif below is child:
            self._children = None

    def disown_all(self) -> None:
        """Let go of every child."""
        self._children = None

    @property
    def attached(self) -> bool:
        """False once the node was pruned, forgotten or dropped by a reset."""
        return self.parent is not None

    def resident(self, tier: Tier) -> bool:
        """PENDING or READY in `tier`."""
        return self.state[tier] is not Residency.ABSENT

    def ready(self, tier: Tier) -> bool:
        """READY in `tier`: its bytes there may be read."""
        return self.state[tier] is Residency.READY

    def __repr__(self) -> str:
        states = " ".join(f"{t.name.lower()}={self.state[t].name}" for t in TIERS)
        return f"<{self._label()} {states} pins={self.pins}>"

    def _label(self) -> str:
        return f"chunk {self.key.hex()[:12]}" if self.key else "root"


class AdapterNode(Node):
    """One identity.  `index` is never reused within a tree, so arrays may be keyed by it.

    `always_resident` marks the base model: it needs no slot, so no residency is set for it.
    `kept` counts who wants to find it again, with its visits, when it is nowhere.
    """

    __slots__ = ("always_resident", "identity", "index", "kept")

    kind = NodeKind.ADAPTER

    def __init__(
        self,
        identity: Identity,
        root: Node,
        *,
        index: int,
        always_resident: bool,
        nbytes: int,
        seq: int,
        now: float,
    ) -> None:
        super().__init__(ChunkKey(b""), root, self, nbytes=nbytes, seq=seq, now=now)
        self.identity = identity
        self.index = index
        self.always_resident = always_resident
        self.kept = 0

    def _label(self) -> str:
        return f"adapter {self.identity}"
