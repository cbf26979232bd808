"""Places of adapters: who is in a GPU slot or in vLLM's host cache, and who may go.

The account that `ledger.py` keeps.  A place counts as taken from the grant on and as free
from the moment its holder was told to go; listeners hear of every change at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from elora_connector.core.adapter_orders import Check, Loaded, Order
from elora_connector.core.slot_watch import SlotWatch
from elora_connector.core.types import Identity, Residency


@dataclass(slots=True, eq=False)
class Entry:
    """One adapter id.

    Attributes:
        digest, load: content and load of the weights that are registered; None, (): unknown.
        known: last reported identity, kept when the weights are gone.
        fits: digest of the content that was last reported in a GPU slot, kept as well.
        order: the order for it that has not ended.
        check: strongest check to be made before the digest is believed again.
        users: admitted requests.
    """

    lora_id: int
    name: str
    digest: bytes | None = None
    load: tuple[int, ...] = ()
    known: Identity | None = None
    fits: bytes | None = None
    nbytes: int = 0
    in_host: bool = False
    in_slot: bool = False
    pinned: bool = False
    order: Order | None = None
    check: Check = Check.NONE
    users: set[str] = field(default_factory=set)

    @property
    def granted(self) -> bool:
        """An order under way brings it into places that count as its own."""
        return self.order is not None and self.order.granted

    @property
    def has_slot(self) -> bool:
        """In a GPU slot, or granted one."""
        return self.in_slot or (self.granted and self.order is not None and self.order.activate)

    @property
    def has_place(self) -> bool:
        """In vLLM's host cache, or granted a place there."""
        return self.in_host or self.granted

    def residency(self) -> tuple[Residency, Residency]:
        """In (gpu, host): PENDING from the grant on, READY when reported."""
        return _state(self.in_slot, self.has_slot), _state(self.in_host, self.has_place)

    def leave_host(self) -> None:
        """Not in vLLM's host cache, and so in no slot."""
        self.in_host = self.in_slot = False
        self.digest = None

    def place(self, loaded: Loaded) -> None:
        """It is where all ranks report it."""
        self.in_host = True
        self.in_slot = loaded.in_slot
        self.digest = loaded.digest
        self.load = loaded.load
        self.pinned = loaded.pinned
        self.nbytes = loaded.nbytes
        self.known = Identity(loaded.name, loaded.digest)
        if loaded.in_slot:
            self.fits = loaded.digest


def _state(is_there: bool, counts: bool) -> Residency:
    if is_there:
        return Residency.READY
    return Residency.PENDING if counts else Residency.ABSENT


class PlaceListener(Protocol):
    """Told of every change of an adapter's places, from inside the ledger's methods."""

    def placed(self, entry: Entry) -> None:
        """`entry.residency()`, its identity or size changed; read only."""
        ...

    def forgotten(self, entry: Entry) -> None:
        """The ledger dropped the entry, which had no place."""
        ...


class VictimChooser(Protocol):
    """Decides who goes.  Without one the ledger takes the least recently used."""

    def rank(self, lora_ids: Sequence[int], now: float) -> list[int]:
        """Those that may go, the least valuable first; a subset of `lora_ids`."""
        ...

    def has_room(self, lora_id: int) -> bool:
        """Does the host budget hold `lora_id` besides what is there?"""
        ...

    def make_room(
        self, lora_id: int, leaving: Sequence[int], spare: Sequence[int], now: float
    ) -> tuple[int, ...] | None:
        """Make the host budget hold `lora_id` besides what stays.

        May evict KV chunks at once, all of what is needed or nothing.

        Args:
            leaving: ids that go anyway.
            spare: ids that may go as well.

        Returns:
            Which of `spare` have to go; None if there is no way (nothing changed).
        """
        ...


class LeastRecentlyUsed:
    """No scores, no byte budget."""

    def rank(self, lora_ids: Sequence[int], now: float) -> list[int]:
        return list(lora_ids)

    def has_room(self, lora_id: int) -> bool:
        return True

    def make_room(
        self, lora_id: int, leaving: Sequence[int], spare: Sequence[int], now: float
    ) -> tuple[int, ...] | None:
        return ()


@dataclass(frozen=True, slots=True)
class Victims:
    """Who leaves the host cache, and who only a GPU slot."""

    evict: tuple[int, ...] = ()
    displace: tuple[int, ...] = ()


class AdapterPlaces:
    """All entries, least recently used first.

    Args:
        slots: GPU LoRA slots.
        host_capacity: adapters in vLLM's host cache; None: only bytes bound it.
    """

    def __init__(self, slots: int, host_capacity: int | None) -> None:
        self.slots = slots
        self.host_capacity = host_capacity
        self.chooser: VictimChooser = LeastRecentlyUsed()
        self.slot_watch = SlotWatch()
        self.listener: PlaceListener | None = None
        self.pinned: set[int] = set()
        """Ids that hold a slot which the operator pinned."""
        self._entries: OrderedDict[int, Entry] = OrderedDict()

    # ---- entries -----------------------------------------------------------------

    def __getitem__(self, lora_id: int) -> Entry:
        return self._entries[lora_id]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, lora_id: int) -> Entry | None:
        return self._entries.get(lora_id)

    def entry(self, lora_id: int, name: str) -> Entry:
        """Get or create; a new name of an id replaces the old one."""
        entry = self._entries.get(lora_id)
        if entry is None:
            entry = self._entries[lora_id] = Entry(lora_id, name)
        elif entry.name != name:
            entry.name = name
            self.moved(entry)
        return entry

    def touch(self, entry: Entry) -> None:
        """Most recently used."""
        self._entries.move_to_end(entry.lora_id)

    def forget(self, entry: Entry) -> None:
        """Drop an entry without places."""
        del self._entries[entry.lora_id]
        if self.listener is not None:
            self.listener.forgotten(entry)

    def moved(self, entry: Entry) -> None:
        """Tell the listeners: whoever leaves a slot first, whoever takes one last."""
        if not entry.has_slot:
            self.slot_watch.update(entry.lora_id, None)
        if self.listener is not None:
            self.listener.placed(entry)
        if entry.has_slot:
            self.slot_watch.update(entry.lora_id, entry.name)

    # ---- room --------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing and are granted to nobody."""
        return self.slots - sum(e.has_slot for e in self)

    @property
    def free_host(self) -> bool:
        """May one more adapter enter the host cache, counting heads?"""
        return self.host_capacity is None or self.hosted < self.host_capacity

    @property
    def hosted(self) -> int:
        """Adapters in the host cache or granted a place there."""
        return sum(e.has_place for e in self)

    def victims(
        self, entry: Entry, protect: Container[int], now: float, *, slot: bool
    ) -> Victims | None:
        """Who has to go so that `entry` gets a host place and, with `slot`, a GPU slot.

        Returns:
            None if there is no way now; nothing changed then.
        """
        evict = self._beyond_heads(entry, protect, now)
        if evict is None or (slot and self._for_slot(entry, evict, protect, now) is None):
            return None
        if not entry.has_place:
            more = self._for_bytes(entry, evict, protect, now)
            if more is None:
                return None
            evict += more
        displace = self._for_slot(entry, evict, protect, now) if slot else ()
        return None if displace is None else Victims(evict, displace)

    def may_leave_host(self, entry: Entry, protect: Container[int]) -> bool:
        """Is it in the host cache, and could another adapter or chunk have its place?"""
        return entry.in_host and _may_go(entry, protect)

    def _beyond_heads(
        self, entry: Entry, protect: Container[int], now: float
    ) -> tuple[int, ...] | None:
        if self.host_capacity is None or entry.has_place:
            return ()
        excess = self.hosted - self.host_capacity + 1
        if excess <= 0:
            return ()
        return self._lowest(excess, (e for e in self if self.may_leave_host(e, protect)), now)

    def _for_bytes(
        self, entry: Entry, evicted: tuple[int, ...], protect: Container[int], now: float
    ) -> tuple[int, ...] | None:
        beyond = self.hosted - len(evicted) + 1 - self.slots
        spare = [e.lora_id for e in self if self.may_leave_host(e, protect)]
        spare = self.chooser.rank([i for i in spare if i not in evicted], now)
        spare = spare[: max(0, beyond)]
        more = self.chooser.make_room(entry.lora_id, evicted, spare, now)
        if more is None and len(spare) >= beyond:
            return tuple(spare)  # a slot's worth passes the budget rather than waits
        return more

    def _for_slot(
        self, entry: Entry, evicted: Container[int], protect: Container[int], now: float
    ) -> tuple[int, ...] | None:
        holders = [e for e in self if e is not entry and e.lora_id not in evicted and e.has_slot]
        excess = len(holders) - self.slots + 1
        if excess <= 0:
            return ()
        return self._lowest(excess, (e for e in holders if _may_go(e, protect)), now)

    def _lowest(self, count: int, entries: Iterable[Entry], now: float) -> tuple[int, ...] | None:
        candidates = [e.lora_id for e in entries]
        if len(candidates) < count:
            return None
        ranked = self.chooser.rank(candidates, now)
        return tuple(ranked[:count]) if len(ranked) >= count else None

    # ---- orders and reports ------------------------------------------------------

    def mark_gone(self, order: Order) -> None:
        """From the order on its victims count as gone."""
        for lora_id in order.evict:
            self._entries[lora_id].leave_host()
            self.moved(self._entries[lora_id])
        for lora_id in order.displace:
            self._entries[lora_id].in_slot = False
            self.moved(self._entries[lora_id])

    def adopt(self, loaded: Mapping[int, Loaded], orders: Iterable[Order]) -> list[Entry]:
        """Believe what all ranks report, except of what `orders` under way change.

        Returns:
            Entries whose places may have changed; they are to be told of (`tell`).
        """
        for state in loaded.values():
            self._entries.setdefault(state.lora_id, Entry(state.lora_id, state.name))
        self.pinned = {i for i, state in loaded.items() if state.pinned and state.in_slot}
        under_way = list(orders)
        leaving = {i for order in under_way for i in order.evict}
        displaced = {i for order in under_way for i in order.displace}
        concerned = [e for e in self if e.in_host or e.order or e.lora_id in loaded]
        for entry in concerned:
            state_of = loaded.get(entry.lora_id)
            if state_of is None or (not entry.granted and entry.lora_id in leaving):
                # Also under an open order: an out-of-step call may have thrown it out.
                entry.leave_host()
            elif entry.granted:
                entry.in_slot &= state_of.in_slot
            else:
                entry.place(state_of)
                entry.in_slot &= entry.lora_id not in displaced
        return concerned

    def tell(self, entries: Iterable[Entry]) -> None:
        """Tell of them all: those without a slot first, so names never outnumber slots."""
        for entry in sorted(entries, key=lambda e: e.has_slot):
            self.moved(entry)


def _may_go(entry: Entry, protect: Container[int]) -> bool:
    """Can it lose its place to another adapter?  One that is only being looked at can."""
    return not entry.granted and not entry.pinned and entry.lora_id not in protect
