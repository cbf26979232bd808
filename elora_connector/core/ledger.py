"""Adapter slot ledger: the scheduler's account of which adapter is where.

vLLM's workers keep adapters in two caches: host memory (`max_cpu_loras`) and GPU
slots (`max_loras`).  If every rank chose its own victims, ranks would drift apart
and two waiting requests could evict each other's adapter for ever.  So the
scheduler decides and orders, the workers obey and report, and a request is
admitted only when the ledger says that its adapter's weights are resident.

Rules (each one closes a hang or a wrong answer that was observed):

* *taken* = adapters of admitted requests (running, preempted or waiting for
  their KV) + adapters held for a request that was asked but is not scheduled yet.
* An adapter outside *taken* is not admitted while ``len(taken) >= slots``, even if
  it happens to sit in a slot: its forward would throw out a held one.
* A hold is taken in the order in which vLLM asks, and lives until its request is
  scheduled, ends, or is past its deadline.
* Only adapters outside *taken* are evicted.  From the order on they count as gone.
* An adapter counts as resident only after every rank acknowledged the order **and**
  reported the content digest of that load.
* Two ids under one name never run together: vLLM's workers tell them apart by name.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from elora_connector.core.slot_watch import SlotWatch
from elora_connector.core.types import Identity
from elora_connector.errors import InvariantError


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


@dataclass(slots=True)
class Order:
    """Make one adapter resident.  Mutable until shipped, then immutable by convention."""

    seq: int
    lora_id: int
    activate: bool
    check: Check
    evict: tuple[int, ...] = ()
    displace: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """One adapter as all ranks report it: digest of this very load, and its place.

    `load` numbers the load on every rank; it changes whenever weights were written.
    """

    lora_id: int
    name: str
    digest: bytes
    load: tuple[int, ...]
    in_slot: bool
    pinned: bool = False


@dataclass(slots=True)
class _Entry:
    lora_id: int
    name: str
    digest: bytes | None = None
    load: tuple[int, ...] = ()
    in_host: bool = False
    in_slot: bool = False
    pinned: bool = False
    order: Order | None = None
    check: Check = Check.NONE
    """Strongest check that has to be made before the digest is believed again."""
    users: set[str] = field(default_factory=set)

    @property
    def has_slot(self) -> bool:
        """In a GPU slot, or on its way into one that is counted as its own."""
        return self.in_slot or (self.order is not None and self.order.activate)


@dataclass(slots=True)
class _Hold:
    owner: str
    since: float


class AdapterLedger:
    """Slot and host-cache bookkeeping of all adapters; pure, called by one thread.

    Args:
        slots: GPU LoRA slots (`max_loras`).
        host_capacity: adapters in vLLM's host cache (`max_cpu_loras`), >= slots.
        level: which residency the gate asks for.

    Attributes:
        slot_watch: names with a GPU slot; tells its listeners of every change at once.
    """

    def __init__(self, slots: int, host_capacity: int, level: Level = Level.SLOT) -> None:
        if not 1 <= slots <= host_capacity:
            raise InvariantError(f"need 1 <= slots <= host capacity, got {slots}, {host_capacity}")
        self.slots = slots
        self.host_capacity = host_capacity
        self.level = level
        self.slot_watch = SlotWatch()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently used first
        self._holds: OrderedDict[int, _Hold] = OrderedDict()
        self._in_use: set[int] = set()
        self._pinned: set[int] = set()
        self._cancelled: list[int] = []
        self._outbox: list[Order] = []
        self._open: dict[int, Order] = {}
        self._seq = 0
        self._rpcs = 0
        self._rpcs_seen = 0

    # ---- questions -------------------------------------------------------------

    def identity(self, lora_id: int) -> Identity | None:
        """Name and content digest of the loaded weights, or None while unknown."""
        entry = self._entries.get(lora_id)
        if entry is None or not entry.in_host or entry.digest is None or not self.verified(lora_id):
            return None
        return Identity(entry.name, entry.digest)

    def verified(self, lora_id: int) -> bool:
        """False while the weights under this id may have changed without our knowing."""
        entry = self._entries.get(lora_id)
        return not self.suspended and entry is not None and entry.check is Check.NONE

    @property
    def suspended(self) -> bool:
        """An out-of-step call changed the workers and no report has shown it yet."""
        return self._rpcs_seen < self._rpcs

    def resident(self, lora_id: int) -> bool:
        """Weights are where `level` asks for, with a verified digest."""
        entry = self._entries.get(lora_id)
        return entry is not None and self._resident(entry)

    def taken(self) -> set[int]:
        """Ids that may not lose their place now."""
        return self._in_use.union(self._holds)

    def usable(self, lora_id: int) -> bool:
        """Some weights are loaded, be they checked or not."""
        entry = self._entries.get(lora_id)
        return entry is not None and entry.in_host and entry.digest is not None

    def in_use(self) -> frozenset[int]:
        """Ids of adapters with admitted requests."""
        return frozenset(self._in_use)

    def counts(self) -> tuple[int, int]:
        """Adapters in GPU slots and in host memory, as the ledger believes."""
        entries = self._entries.values()
        return sum(e.in_slot for e in entries), sum(e.in_host for e in entries)

    def load(self, lora_id: int) -> tuple[int, ...]:
        """Which load, rank by rank, the weights are from; empty when none was reported."""
        entry = self._entries.get(lora_id)
        return () if entry is None else entry.load

    # ---- requests --------------------------------------------------------------

    def register(self, lora_id: int, name: str, check: Check = Check.NONE) -> None:
        """A request of this adapter arrived; `check` asks for a look at its files."""
        entry = self._entries.get(lora_id)
        if entry is None:
            self._entries[lora_id] = _Entry(lora_id, name)
            return  # a first load is always fingerprinted
        entry.name = name
        self._watch(entry)
        if check > Check.NONE and (entry.in_host or entry.order is not None):
            self._demand_check(entry, check)

    def prefetch(self, lora_id: int, wanted: Iterable[int]) -> None:
        """Order the weights into host memory early, if that takes nothing from anyone.

        Args:
            wanted: adapters of waiting requests (read only if needed); none is evicted.
        """
        entry = self._entries[lora_id]
        if self.suspended or entry.order is not None or entry.in_host:
            return
        victims = self._host_victims(entry, protect=set())
        if victims:
            victims = self._host_victims(entry, protect=self.taken().union(wanted))
        if victims is not None:
            self._order(entry, activate=False, evict=victims)

    def admit(self, request_id: str, lora_id: int, now: float) -> Gate:
        """Ask for residency; repeated asks change nothing more (idempotent).

        READY holds the adapter for this request until `scheduled`, `finished` or
        `release`.
        """
        entry = self._entries[lora_id]
        if self.suspended:
            return Gate.SUSPENDED
        taken = self.taken()
        rivals = self._rivals(entry, taken)
        if rivals:
            # The first to ask bars further admissions of the other id, or it would starve;
            # two holds under one name would wait for each other for ever.
            if rivals.isdisjoint(self._holds) and len(taken) < self.slots:
                self._holds.setdefault(lora_id, _Hold(request_id, now))
            return Gate.NAME_BUSY
        crowd = taken | self._pinned
        if lora_id not in crowd and len(crowd) >= self.slots:
            return Gate.PINNED if len(self._pinned) >= self.slots else Gate.NO_SLOT
        if not entry.users:
            self._holds.setdefault(lora_id, _Hold(request_id, now))
        if self._resident(entry):
            return Gate.READY
        self._ensure_ordered(entry)
        return Gate.LOADING

    def scheduled(self, request_id: str, lora_id: int) -> None:
        """The request got its blocks: it is a user now, the hold ends."""
        entry = self._entries[lora_id]
        entry.users.add(request_id)
        self._in_use.add(lora_id)
        self._holds.pop(lora_id, None)
        self._entries.move_to_end(lora_id)

    def finished(self, request_id: str, lora_id: int) -> None:
        """The request ended, in whatever state."""
        entry = self._entries.get(lora_id)
        if entry is not None:
            entry.users.discard(request_id)
            if not entry.users:
                self._in_use.discard(lora_id)
        self.release(request_id, lora_id)

    def release(self, request_id: str, lora_id: int) -> None:
        """Give up the hold of a waiting request (abort, deadline)."""
        hold = self._holds.get(lora_id)
        if hold is not None and hold.owner == request_id:
            del self._holds[lora_id]

    def cancel(self, lora_id: int) -> None:
        """Nobody waits for this adapter any more: withdraw its order.

        What it would have put out stays where the workers' next report says it is; an
        adapter whose files hang must not keep others from their places.
        """
        entry = self._entries.get(lora_id)
        if entry is None or entry.order is None or entry.users:
            return
        order, entry.order = entry.order, None
        self._watch(entry)
        self._open.pop(order.seq, None)
        if order in self._outbox:
            self._outbox.remove(order)
        self._cancelled.append(order.seq)

    # ---- workers ---------------------------------------------------------------

    def take_orders(self) -> list[Order]:
        """Orders to ship with this step's metadata, oldest first."""
        orders, self._outbox = self._outbox, []
        return orders

    def take_cancelled(self) -> list[int]:
        """Numbers of withdrawn orders, to ship with this step's metadata."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def rpc_sent(self, lora_id: int, name: str | None) -> None:
        """vLLM itself calls the workers (add_lora, remove_lora, pin_lora) between steps.

        Until a report made after the call arrives, nothing about adapters is believed.
        `name` is given where the call may bring in or change weights.
        """
        self._rpcs += 1
        if name is not None:
            self._entries.setdefault(lora_id, _Entry(lora_id, name)).digest = None

    @property
    def rpcs(self) -> int:
        """Count of such calls; shipped with every step and echoed by the workers."""
        return self._rpcs

    def on_report(self, acked_seq: int, rpcs: int, loaded: Mapping[int, Loaded]) -> None:
        """Take in what **all** ranks agree on (minimum of sequences, common adapters).

        Reports may lag behind orders by any number of steps: an order's outcome counts
        once its number is acknowledged, and what a report says of an adapter is adopted
        unless an order still under way concerns that adapter.

        Args:
            acked_seq: every order up to this number has ended on every rank.
            rpcs: `rpcs` as it stood in the metadata of the step that made the report.
            loaded: adapters loaded on every rank with one digest.
        """
        self._rpcs_seen = max(self._rpcs_seen, rpcs)
        for entry in self._entries.values():
            order = entry.order
            if order is not None and order.seq <= acked_seq:
                self._settle(entry, order, loaded.get(entry.lora_id))
        self._open = {seq: order for seq, order in self._open.items() if seq > acked_seq}
        if not self.suspended:
            self._adopt(loaded)
        for entry in sorted(self._entries.values(), key=lambda e: e.has_slot):
            self._watch(entry)  # those that left first: never more names than slots

    def distrust(self, lora_id: int) -> bool:
        """Ranks report different contents: the next order reads the files again.

        Returns:
            False while that, or any order for the adapter, is still to be done.
        """
        entry = self._entries.get(lora_id)
        if entry is None or entry.order is not None or entry.check is Check.ALWAYS:
            return False
        entry.check = Check.ALWAYS
        return True

    # ---- inside ----------------------------------------------------------------

    def _resident(self, entry: _Entry) -> bool:
        placed = entry.in_slot if self.level is Level.SLOT else entry.in_host
        return placed and entry.digest is not None and self.verified(entry.lora_id)

    def _rivals(self, entry: _Entry, taken: set[int]) -> set[int]:
        """Ids in use or held under the same adapter name."""
        return {
            other
            for other in taken
            if other != entry.lora_id and self._entries[other].name == entry.name
        }

    def _demand_check(self, entry: _Entry, check: Check) -> None:
        entry.check = max(entry.check, check)
        unshipped = entry.order is not None and entry.order in self._outbox
        if unshipped and entry.order is not None:
            entry.order.check = max(entry.order.check, check)
        else:
            # One under way that brings it into a slot still does: it is counted as there.
            self._order(entry, activate=entry.has_slot, evict=())

    def _ensure_ordered(self, entry: _Entry) -> None:
        order = entry.order
        wants_slot = self.level is Level.SLOT and not entry.in_slot
        if order is not None and (order.activate or not wants_slot):
            return
        protect = self.taken()
        evict = self._host_victims(entry, protect)
        if evict is None:
            return  # other ids hold every place until their orders end; asked again next step
        displace = self._slot_victims(entry, protect, evict) if wants_slot else ()
        if displace is None:
            return
        if order is not None and order in self._outbox:
            order.activate = wants_slot
            order.displace = displace
            self._mark_gone(order)
            self._watch(entry)
            return
        self._order(entry, activate=wants_slot, evict=evict, displace=displace)

    def _order(
        self,
        entry: _Entry,
        *,
        activate: bool,
        evict: tuple[int, ...],
        displace: tuple[int, ...] = (),
    ) -> None:
        self._seq += 1
        entry.order = Order(self._seq, entry.lora_id, activate, entry.check, evict, displace)
        self._outbox.append(entry.order)
        self._open[self._seq] = entry.order
        self._mark_gone(entry.order)
        self._watch(entry)

    def _watch(self, entry: _Entry) -> None:
        self.slot_watch.update(entry.lora_id, entry.name if entry.has_slot else None)

    def _mark_gone(self, order: Order) -> None:
        for lora_id in order.evict:
            gone = self._entries[lora_id]
            gone.in_host = gone.in_slot = False
            gone.digest = None
            self._watch(gone)
        for lora_id in order.displace:
            self._entries[lora_id].in_slot = False
            self._watch(self._entries[lora_id])

    def _host_victims(self, entry: _Entry, protect: set[int]) -> tuple[int, ...] | None:
        """Ids to evict so that `entry` fits into host memory; None if it cannot fit."""
        occupied = [e for e in self._entries.values() if e.in_host or e.order is not None]
        if entry in occupied or len(occupied) < self.host_capacity:
            return ()
        excess = len(occupied) - self.host_capacity + 1
        free = [e.lora_id for e in occupied if _may_go(e, protect)]
        return tuple(free[:excess]) if len(free) >= excess else None

    def _slot_victims(
        self, entry: _Entry, protect: set[int], evicted: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        """Ids to displace so that `entry` gets a GPU slot; None if there is none."""
        holders = [
            e
            for e in self._entries.values()
            if e is not entry and e.lora_id not in evicted and e.has_slot
        ]
        excess = len(holders) - self.slots + 1
        if excess <= 0:
            return ()
        free = [e.lora_id for e in holders if _may_go(e, protect)]
        return tuple(free[:excess]) if len(free) >= excess else None

    def _settle(self, entry: _Entry, order: Order, loaded: Loaded | None) -> None:
        entry.order = None
        if order.check >= entry.check:
            entry.check = Check.NONE
        if loaded is not None:
            # Also after a failed re-check: the old weights are still there, and usable.
            self._place(entry, loaded)
        else:
            # Not there although acknowledged: ordered again when a request asks again.
            entry.in_host = entry.in_slot = False
            entry.digest = None

    @staticmethod
    def _place(entry: _Entry, loaded: Loaded) -> None:
        entry.in_host = True
        entry.in_slot = loaded.in_slot
        entry.digest = loaded.digest
        entry.load = loaded.load
        entry.pinned = loaded.pinned

    def _adopt(self, loaded: Mapping[int, Loaded]) -> None:
        for state in loaded.values():
            self._entries.setdefault(state.lora_id, _Entry(state.lora_id, state.name))
        self._pinned = {i for i, state in loaded.items() if state.pinned and state.in_slot}
        leaving = {i for order in self._open.values() for i in order.evict}
        displaced = {i for order in self._open.values() for i in order.displace}
        for entry in self._entries.values():
            state_of = loaded.get(entry.lora_id)
            if state_of is None or (entry.order is None and entry.lora_id in leaving):
                # Also under an open order: an out-of-step call may have thrown it out.
                entry.in_host = entry.in_slot = False
                entry.digest = None
            elif entry.order is not None:
                entry.in_slot &= state_of.in_slot
            else:
                self._place(entry, state_of)
                entry.in_slot &= entry.lora_id not in displaced

    def forget_idle(self, keep: int, live: Callable[[], Container[int]]) -> list[int]:
        """Drop entries of adapters that are nowhere and unused, oldest first, beyond `keep`.

        Args:
            live: ids that some request names (asked for only when there is much to drop).
        """
        if len(self._entries) <= keep:
            return []
        named = live()
        idle = [
            e.lora_id
            for e in self._entries.values()
            if not (e.in_host or e.users or e.order)
            and e.lora_id not in self._holds
            and e.lora_id not in named
        ]
        dropped = idle[: len(self._entries) - keep]
        for lora_id in dropped:
            del self._entries[lora_id]
        return dropped


def _may_go(entry: _Entry, protect: Container[int]) -> bool:
    """Can it lose its place to another adapter?"""
    return entry.order is None and not entry.pinned and entry.lora_id not in protect
