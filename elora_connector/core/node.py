"""Vertices of the dependency tree.  Fields are written by `tree.py` and `leaves.py` only."""

from __future__ import annotations

import enum
from typing import Final

from elora_connector.core.types import ChunkKey, Identity, Residency, Tier

NO_SLOT: Final = -1
NOT_LISTED: Final = -1
TIERS: Final = tuple(Tier)


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
        listed: in how many LeafTables the node is.
        pins: eviction and pruning are off while positive.
        weight: visits in the inflated unit of `leaves.VisitClock`.
        last_use: time of the last touch (creation before the first one), seconds.
        version: raised when the facts that a score depends on changed.
        seq: creation number, the tie-break between equal scores.
        slot, generation: place in the host buffer while resident there.
        children: by chunk key; None until the first one.
    """

    __slots__ = (
        "__weakref__",
        "adapter",
        "children",
        "generation",
        "key",
        "last_use",
        "listed",
        "nbytes",
        "parent",
        "pins",
        "resident_children",
        "rows",
        "seq",
        "slot",
        "state",
        "version",
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
        self.version = 0
        self.pins = 0
        self.listed = 0
        self.slot = NO_SLOT
        self.generation = 0
        self.state: list[Residency] = [Residency.ABSENT] * len(TIERS)
        self.resident_children: list[int] = [0] * len(TIERS)
        self.rows: list[int] = [NOT_LISTED] * len(TIERS)
        self.children: dict[ChunkKey, Node] | None = None

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
