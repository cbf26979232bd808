"""Vertices of the dependency tree.  Fields are written by `tree.py` and `leaves.py` only.

There may be a million of them, so what many nodes have alike is shared: the triples of
residencies, child counts and rows are tuples out of a common store, a chain of chunks that
were made and used together has one `Run`, and a node with one child needs no dictionary.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Mapping
from typing import Final

from elora_connector.core.types import ChunkKey, Identity, Residency, Tier

NO_SLOT: Final = -1
NOT_LISTED: Final = -1
TIERS: Final = tuple(Tier)

States = tuple[Residency, Residency, Residency]
Triple = tuple[int, int, int]
Counts = tuple[int, int, int, int]

UNLISTED: Final[Triple] = (NOT_LISTED, NOT_LISTED, NOT_LISTED)
"""`Node.rows` of a node in no LeafTable; always this very object."""

_STATES: Final[dict[States, States]] = {
    (g, h, r): (g, h, r) for g in Residency for h in Residency for r in Residency
}
_SMALL: Final = 4
_COUNTS: Final[dict[Counts, Counts]] = {
    (g, h, r, p): (g, h, r, p) for g, h, r, p in itertools.product(range(_SMALL), repeat=4)
}
_NOWHERE: Final[States] = _STATES[Residency.ABSENT, Residency.ABSENT, Residency.ABSENT]
NO_COUNTS: Final[Counts] = _COUNTS[0, 0, 0, 0]
PINS: Final = 3
"""Where `Node.counts` has the pins, after the children of each tier."""

NO_PLACE: Final = -1
_SLOT_BITS: Final = 32
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1


def place_of(slot: int, generation: int) -> int:
    """One number for a slot and its generation, as `Node.place` keeps them."""
    return NO_PLACE if slot == NO_SLOT else generation << _SLOT_BITS | slot


def with_state(states: States, tier: Tier, state: Residency) -> States:
    """`states` with one tier changed, as the shared tuple."""
    gpu, host, remote = states
    if tier is Tier.HOST:
        return _STATES[gpu, state, remote]
    return _STATES[(state, host, remote) if tier is Tier.GPU else (gpu, host, state)]


def with_count(counts: Counts, which: int, change: int) -> Counts:
    """`counts` with `change` added for one tier or PINS, shared while all are small."""
    gpu, host, remote, pins = counts
    if which == Tier.HOST:
        changed = gpu, host + change, remote, pins
    elif which == PINS:
        changed = gpu, host, remote, pins + change
    elif which == Tier.GPU:
        changed = gpu + change, host, remote, pins
    else:
        changed = gpu, host, remote + change, pins
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


class Run:
    """What nodes on one path that were made and used together have alike; never changed.

    A visit of some of them gives those a new one (`used`), so that a path has as many as
    there were places where requests ended or parted.

    Attributes:
        adapter: the adapter above (itself for an adapter, None for the root).
        seq: creation number, the tie-break between equal scores.
        nbytes: size over one rank.
        last_use: time of the last touch (creation before the first one), seconds.
        weight: visits in the inflated unit of `leaves.VisitClock`.
    """

    __slots__ = ("adapter", "last_use", "nbytes", "seq", "weight")

    def __init__(
        self, adapter: AdapterNode | None, seq: int, nbytes: int, last_use: float, weight: float
    ) -> None:
        self.adapter = adapter
        self.seq = seq
        self.nbytes = nbytes
        self.last_use = last_use
        self.weight = weight

    def used(self, now: float, gain: float) -> Run:
        """After a visit at `now` that weighs `gain`."""
        return Run(self.adapter, self.seq, self.nbytes, now, self.weight + gain)

    def scaled(self, factor: float) -> Run:
        """With another unit of weight."""
        return Run(self.adapter, self.seq, self.nbytes, self.last_use, self.weight * factor)

    def resized(self, nbytes: int) -> Run:
        """With another size."""
        return Run(self.adapter, self.seq, nbytes, self.last_use, self.weight)


class Node:
    """One chunk, or (as `AdapterNode`) one adapter, or the virtual root.

    Attributes:
        key: chunk key; empty for an adapter and the root.
        parent: None for the root and for a node that left the tree.
        run: what it shares with its neighbours.
        state: residency per tier; `nbytes` count in every tier where it is resident.
        counts: children PENDING or READY, per tier; then the pins (see PINS).
        rows: row in each tier's LeafTable, NOT_LISTED when it is in none.
        place: slot and generation in the host buffer while resident there.
    """

    __slots__ = (
        "_children",
        "counts",
        "key",
        "parent",
        "place",
        "rows",
        "run",
        "state",
    )

    kind: NodeKind = NodeKind.CHUNK

    def __init__(self, key: ChunkKey, parent: Node | None, run: Run) -> None:
        self.key = key
        self.parent = parent
        self.run = run
        self.place = NO_PLACE
        self.state = _NOWHERE
        self.counts = NO_COUNTS
        self.rows = UNLISTED
        self._children: Node | dict[ChunkKey, Node] | None = None

    @property
    def adapter(self) -> AdapterNode | None:
        """The adapter above; itself for an adapter, None for the root."""
        return self.run.adapter

    @property
    def pins(self) -> int:
        """Eviction and pruning are off while positive."""
        return self.counts[PINS]

    @property
    def slot(self) -> int:
        """Slot of the host buffer, or NO_SLOT."""
        return NO_SLOT if self.place == NO_PLACE else self.place & _SLOT_MASK

    @property
    def generation(self) -> int:
        """Which use of the slot; 0 without one."""
        return 0 if self.place == NO_PLACE else self.place >> _SLOT_BITS

    @property
    def seq(self) -> int:
        """Creation number, see `Run`."""
        return self.run.seq

    @property
    def nbytes(self) -> int:
        """Size over one rank."""
        return self.run.nbytes

    @property
    def last_use(self) -> float:
        """Time of the last touch, or of creation; seconds."""
        return self.run.last_use

    @property
    def weight(self) -> float:
        """Visits in the inflated unit of `leaves.VisitClock`."""
        return self.run.weight

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
        weight: float,
    ) -> None:
        super().__init__(ChunkKey(b""), root, Run(self, seq, nbytes, now, weight))
        self.identity = identity
        self.index = index
        self.always_resident = always_resident
        self.kept = 0

    def _label(self) -> str:
        return f"adapter {self.identity}"
