"""Adapter slot ledger: who waits for which adapter, and who is admitted.

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
* A hold is taken in the order in which vLLM asks, once the weights are in hand: files
  that hang keep nobody from a slot.  It lives until its request is scheduled, ends, or
  is past its deadline.
* Only adapters outside *taken* are evicted.  From the grant on they count as gone.
* An adapter counts as resident only after every rank acknowledged the order **and**
  reported the content digest of that load.  Weights that every rank holds in host memory,
  reported and unchanged, and that have been in a slot before, need no such answer: ranks
  place them before the forward of the step that brings the order.
* Two ids under one name never run together: vLLM's workers tell them apart by name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from elora_connector.core.adapter_orders import (
    Acks,
    Check,
    Gate,
    Grant,
    Level,
    Loaded,
    Order,
    Placing,
)
from elora_connector.core.adapter_places import AdapterPlaces, Entry
from elora_connector.core.order_book import OrderBook
from elora_connector.core.slot_watch import SlotWatch
from elora_connector.core.types import Identity
from elora_connector.errors import InvariantError

__all__ = [
    "Acks",
    "AdapterLedger",
    "Check",
    "Gate",
    "Grant",
    "Level",
    "Loaded",
    "Order",
    "Placing",
]

READS = 8
"""Adapters being read, or read and waiting for a place, at a time: each takes memory beside
the budget, and one that hangs keeps a thread of the worker."""


@dataclass(slots=True)
class _Hold:
    owner: str
    since: float


class AdapterLedger:
    """Slot and host-cache bookkeeping of all adapters; pure, called by one thread.

    Args:
        slots: GPU LoRA slots (`max_loras`).
        host_capacity: adapters in vLLM's host cache (`max_cpu_loras`), >= slots; None:
            only the chooser's byte budget bounds it.
        level: which residency the gate asks for.

    Attributes:
        places: who is where; set its `chooser` and `listener`.
        orders: what to ship to the workers.
    """

    def __init__(self, slots: int, host_capacity: int | None, level: Level = Level.SLOT) -> None:
        if slots < 1 or (host_capacity is not None and host_capacity < slots):
            raise InvariantError(f"need 1 <= slots <= host capacity, got {slots}, {host_capacity}")
        self.places = AdapterPlaces(slots, host_capacity)
        self.orders = OrderBook(self.places)
        self.level = level
        self._holds: OrderedDict[int, _Hold] = OrderedDict()
        self._in_use: set[int] = set()
        self._rpcs = 0
        self._rpcs_seen = 0

    # ---- questions -------------------------------------------------------------

    @property
    def slots(self) -> int:
        """GPU LoRA slots."""
        return self.places.slots

    @property
    def host_capacity(self) -> int | None:
        """Most adapters in vLLM's host cache, None where only bytes bound it."""
        return self.places.host_capacity

    @property
    def slot_watch(self) -> SlotWatch:
        """Names with a GPU slot; tells its listeners of every change at once."""
        return self.places.slot_watch

    def identity(self, lora_id: int) -> Identity | None:
        """Name and content digest of the loaded weights, or None while unknown."""
        entry = self.places.get(lora_id)
        if entry is None or not entry.in_host or entry.digest is None or not self.verified(lora_id):
            return None
        return Identity(entry.name, entry.digest)

    def verified(self, lora_id: int) -> bool:
        """False while the weights under this id may have changed without our knowing."""
        entry = self.places.get(lora_id)
        return not self.suspended and entry is not None and entry.check is Check.NONE

    @property
    def suspended(self) -> bool:
        """An out-of-step call changed the workers and no report has shown it yet."""
        return self._rpcs_seen < self._rpcs

    def resident(self, lora_id: int) -> bool:
        """Weights are where `level` asks for, with a verified digest."""
        entry = self.places.get(lora_id)
        return entry is not None and self._resident(entry)

    def taken(self) -> set[int]:
        """Ids that may not lose their place now."""
        return self._in_use.union(self._holds)

    def usable(self, lora_id: int) -> bool:
        """Some weights are loaded, be they checked or not."""
        entry = self.places.get(lora_id)
        return entry is not None and entry.in_host and entry.digest is not None

    def in_use(self) -> frozenset[int]:
        """Ids of adapters with admitted requests."""
        return frozenset(self._in_use)

    def counts(self) -> tuple[int, int]:
        """Adapters in GPU slots and in host memory, as the ledger believes."""
        return sum(e.in_slot for e in self.places), sum(e.in_host for e in self.places)

    def load(self, lora_id: int) -> tuple[int, ...]:
        """Which load, rank by rank, the weights are from; empty when none was reported."""
        entry = self.places.get(lora_id)
        return () if entry is None else entry.load

    @property
    def quiet(self) -> bool:
        """No order is under way and nothing is held."""
        return not (self.orders.open or self._holds or self.suspended)

    # ---- requests --------------------------------------------------------------

    def register(self, lora_id: int, name: str, check: Check = Check.NONE) -> None:
        """A request of this adapter arrived; `check` asks for a look at its files."""
        entry = self.places.entry(lora_id, name)
        order = entry.order
        if check is Check.NONE or not (entry.in_host or order is not None):
            return  # a first load is always fingerprinted
        entry.check = max(entry.check, check)
        if order is None:
            self._read(entry)
        else:
            # What is under way ends first; what it does not check is ordered then.
            self.orders.strengthen(order, check)

    def read_ahead(self, lora_id: int) -> None:
        """Begin to read the weights; takes nothing from anyone."""
        entry = self.places[lora_id]
        if not (self.suspended or entry.order is not None or entry.in_host):
            self._read(entry)

    def admit(self, request_id: str, lora_id: int, now: float) -> Gate:
        """Ask for residency; repeated asks change nothing more (idempotent).

        READY holds the adapter for this request until `scheduled`, `finished` or
        `release`.
        """
        entry = self.places[lora_id]
        if self.suspended:
            return Gate.SUSPENDED
        pinned, taken = self.places.pinned, self.taken()
        if lora_id not in taken | pinned and len(pinned) >= self.slots:
            return Gate.PINNED
        if not self._in_hand(entry):
            self.release(request_id, lora_id)
            self._read(entry)
            return Gate.LOADING
        return self._admit_loaded(request_id, entry, now)

    def _admit_loaded(self, request_id: str, entry: Entry, now: float) -> Gate:
        """The weights are in hand; may they have, or keep, a slot?"""
        lora_id, taken = entry.lora_id, self.taken()
        rivals = self._rivals(entry, taken)
        if rivals:
            # The first to ask bars further admissions of the other id, or it would starve;
            # two holds under one name would wait for each other for ever.
            if rivals.isdisjoint(self._holds) and len(taken) < self.slots:
                self._holds.setdefault(lora_id, _Hold(request_id, now))
            return Gate.NAME_BUSY
        crowd = taken | self.places.pinned
        if lora_id not in crowd and len(crowd) >= self.slots:
            self.settle_in(lora_id)
            return Gate.NO_SLOT
        if not entry.users:
            self._holds.setdefault(lora_id, _Hold(request_id, now))
        if self._resident(entry):
            return Gate.READY
        self._bring(entry, now)
        return Gate.READY if self._enters_with_step(entry) else Gate.LOADING

    def scheduled(self, request_id: str, lora_id: int) -> None:
        """The request got its blocks: it is a user now, the hold ends."""
        entry = self.places[lora_id]
        entry.users.add(request_id)
        self._in_use.add(lora_id)
        self._holds.pop(lora_id, None)
        self.places.touch(entry)

    def finished(self, request_id: str, lora_id: int) -> None:
        """The request ended, in whatever state."""
        entry = self.places.get(lora_id)
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

        What it would have put out stays where the workers' next report says it is.
        """
        entry = self.places.get(lora_id)
        if entry is not None and entry.order is not None and not entry.users:
            self.orders.withdraw(entry, entry.order)

    # ---- spare places ----------------------------------------------------------

    def settle_in(self, lora_id: int) -> bool:
        """Give weights that were read a free host place, at nobody's expense."""
        entry = self.places[lora_id]
        order = entry.order
        if order is None or not order.read or order.granted:
            return False
        if not (self.places.free_host and self.places.chooser.has_room(lora_id)):
            return False
        self.orders.grant(entry, order, activate=False)
        return True

    def move_in(self, lora_id: int) -> bool:
        """Put host-resident weights into a GPU slot that is free."""
        entry = self.places[lora_id]
        if self.suspended or not self._in_hand(entry) or not entry.in_host or entry.has_slot:
            return False
        if entry.order is not None or self.places.free_slots < 1:
            return False
        self.orders.order(entry, Placing.NOW, activate=True, read=True)
        return True

    def evict(self, lora_ids: Iterable[int]) -> None:
        """Order adapters out of the host cache: their memory goes to KV.

        The caller has asked `places.may_leave_host` about those that are `taken()`.
        """
        self.orders.evict(tuple(lora_ids))

    # ---- workers ---------------------------------------------------------------

    def rpc_sent(self, lora_id: int, name: str | None) -> None:
        """vLLM itself calls the workers (add_lora, remove_lora, pin_lora) between steps.

        Until a report made after the call arrives, nothing about adapters is believed.
        `name` is given where the call may bring in or change weights.
        """
        self._rpcs += 1
        if name is not None:
            entry = self.places.get(lora_id) or self.places.entry(lora_id, name)
            entry.digest = None

    @property
    def rpcs(self) -> int:
        """Count of such calls; shipped with every step and echoed by the workers."""
        return self._rpcs

    def on_report(self, acks: Acks, rpcs: int, loaded: Mapping[int, Loaded]) -> None:
        """Take in what **all** ranks agree on.

        Reports may lag behind orders by any number of steps: an order's outcome counts
        once it has ended everywhere, and what a report says of an adapter is adopted
        unless an order still under way concerns that adapter.

        Args:
            rpcs: `rpcs` as it stood in the metadata of the step that made the report.
            loaded: adapters loaded on every rank with one digest.
        """
        self._rpcs_seen = max(self._rpcs_seen, rpcs)
        if self.suspended:
            return  # the next report says it all again
        ended = self.orders.end(acks)
        concerned = self.places.adopt(loaded, self.orders.open)
        for entry in concerned:
            order = entry.order
            if entry.in_host and order is not None and order.placing is Placing.ON_GRANT:
                self.orders.withdraw(entry, order)  # read for nothing: a call has loaded it
        self.places.tell({*ended, *concerned})

    def failed(self, seq: int, lora_id: int) -> None:
        """Some rank could not read: no rank is to wait for a grant of this order."""
        entry = self.places.get(lora_id)
        order = None if entry is None else entry.order
        waiting = order is not None and order.placing is Placing.ON_GRANT
        if entry is not None and order is not None and waiting and order.seq == seq:
            self.orders.withdraw(entry, order)

    def distrust(self, lora_id: int) -> bool:
        """Ranks report different contents: the next order reads the files again.

        Returns:
            False while that, or any order for the adapter, is still to be done.
        """
        entry = self.places.get(lora_id)
        if entry is None or entry.order is not None or entry.check is Check.ALWAYS:
            return False
        entry.check = Check.ALWAYS
        return True

    def forget_idle(self, keep: int, live: Callable[[], Container[int]]) -> list[int]:
        """Drop entries of adapters that are nowhere and unused, oldest first, beyond `keep`.

        Args:
            live: ids that some request names (asked for only when there is much to drop).
        """
        if len(self.places) <= keep:
            return []
        named = live()
        idle = [
            e
            for e in self.places
            if not (e.in_host or e.users or e.order)
            and e.lora_id not in self._holds
            and e.lora_id not in named
        ]
        dropped = idle[: len(self.places) - keep]
        for entry in dropped:
            self.places.forget(entry)
        return [entry.lora_id for entry in dropped]

    # ---- inside ----------------------------------------------------------------

    def _resident(self, entry: Entry) -> bool:
        placed = entry.in_slot if self.level is Level.SLOT else entry.in_host
        return placed and entry.digest is not None and self.verified(entry.lora_id)

    def _enters_with_step(self, entry: Entry) -> bool:
        """Do ranks put known weights into a slot before the forward of the order's step?

        Only content that was in a slot before: what does not fit the model is found out
        before a batch depends on it.  Nor one that is just being displaced: its batch would
        keep the slot from the adapter that was granted it.
        """
        order = entry.order
        if order is None or not (order.granted and order.activate and entry.in_host):
            return False
        if any(entry.lora_id in other.displace for other in self.orders.open):
            return False
        known = entry.digest is not None and self.verified(entry.lora_id)
        return known and entry.digest == entry.fits

    def _in_hand(self, entry: Entry) -> bool:
        """All ranks have the weights, or will have them in a place granted already."""
        order = entry.order
        if order is not None and (order.granted or order.read):
            return True
        if order is not None and order.placing is Placing.IN_PLACE:
            return False
        return entry.in_host and entry.digest is not None and entry.check is Check.NONE

    def _rivals(self, entry: Entry, taken: set[int]) -> set[int]:
        """Ids in use or held under the same adapter name."""
        return {
            other
            for other in taken
            if other != entry.lora_id and self.places[other].name == entry.name
        }

    def _read(self, entry: Entry) -> None:
        """Have the workers read the weights, or look at their files again."""
        if entry.order is not None:
            return
        if entry.in_host:
            self.orders.order(entry, Placing.IN_PLACE)
        elif self.orders.reading < READS:
            self.orders.order(entry, Placing.ON_GRANT)

    def _bring(self, entry: Entry, now: float) -> None:
        """Weights are in hand: grant them places, if they can be had."""
        order = entry.order
        wants_slot = self.level is Level.SLOT and not entry.in_slot
        on_its_way = order is not None and order.granted
        if on_its_way and (order is None or self.orders.is_shipped(order) or order.activate):
            return  # it ends first
        victims = self.places.victims(entry, self.taken(), now, slot=wants_slot)
        if victims is None:
            return  # others hold every place until they end; asked again next step
        if order is None:
            self.orders.order(entry, Placing.NOW, victims, activate=wants_slot, read=True)
        else:
            self.orders.grant(entry, order, victims, activate=wants_slot)
