"""What the scheduler's adapter ledger tells the workers, and hears from them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Gate(enum.Enum):
    """Answer to "may this request's KV be surfaced now?"."""

    READY = "ready"
    NO_SLOT = "no_slot"
    """Every slot is taken by admitted or held adapters."""
    PINNED = "pinned"
    """Every slot holds an adapter that the operator pinned: waiting would not help."""
    NAME_BUSY = "name_busy"
    """Another id of the same adapter name is in use."""
    LOADING = "loading"
    """Ordered; the weights or their digest are not reported yet."""
    SUSPENDED = "suspended"
    """An add/remove call went past the scheduler; waiting for the workers' report."""


class Level(enum.Enum):
    """What "resident" means: in a GPU slot, or in vLLM's host cache."""

    SLOT = "gpu"
    HOST = "host"


class Check(enum.IntEnum):
    """How hard the worker looks at an adapter's files before it says "loaded"."""

    NONE = 0
    IF_CHANGED = 1
    ALWAYS = 2


class Placing(enum.Enum):
    """When an order's weights enter vLLM's caches.

    Reading may take for ever (a dead network file system), so an order takes a place from
    nobody before every rank has the weights in hand.
    """

    NOW = "now"
    """As soon as the rank has them: they were loaded before, or the grant has come."""
    ON_GRANT = "on_grant"
    """Read in the background, then keep them until a `Grant` says who makes room."""
    IN_PLACE = "in_place"
    """Only if the adapter still is registered: a second look at its files."""


@dataclass(slots=True)
class Order:
    """Make one adapter resident; `lora_id` None: only evict.

    Mutable until shipped.  `read` is set once every rank has the weights in hand, `outrun`
    when a look at the files was asked for that the workers may have had before.
    """

    seq: int
    lora_id: int | None
    check: Check = Check.NONE
    placing: Placing = Placing.NOW
    activate: bool = False
    evict: tuple[int, ...] = ()
    displace: tuple[int, ...] = ()
    read: bool = False
    outrun: bool = False

    @property
    def granted(self) -> bool:
        """Does it bring weights into a place that is counted as its own?"""
        return self.placing is Placing.NOW and self.lora_id is not None


@dataclass(frozen=True, slots=True)
class Grant:
    """Order `seq`, shipped before, gets its places: who leaves the host cache or a slot."""

    seq: int
    activate: bool
    evict: tuple[int, ...]
    displace: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """One adapter as all ranks report it: digest of this very load, and its place.

    `load` numbers the load on every rank; it changes whenever weights were written.
    `nbytes` is the size of the weights on the rank where they are largest.
    """

    lora_id: int
    name: str
    digest: bytes
    load: tuple[int, ...]
    in_slot: bool
    pinned: bool = False
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Acks:
    """What all ranks agree on about orders.

    Args:
        upto: every order up to this number has reached every rank.
        open: numbers up to it that have not ended on some rank.
        read: numbers whose weights every rank has in hand.
    """

    upto: int
    open: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()

    def ended(self, seq: int) -> bool:
        return seq <= self.upto and seq not in self.open
