"""Adapters brought closer ahead of need: from spare capacity only, one at a time.

The paper's swap-in (section VI) for adapters: the highest Eval first, into what is free.
Nothing is evicted for it, and any request that waits for an adapter comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from elora_connector.assembly import AdapterParts
from elora_connector.core.adapter_places import Entry
from elora_connector.core.types import Tier
from elora_connector.metrics import Recorder

_EVERY_S: Final = 0.1
_NOTHING_S: Final = 1.0
"""After a look that found nothing; with thousands of adapters it is not free."""
_RECENT_S: Final = 600.0
"""Adapters that were not used for longer are not worth the trouble."""
_RETRY_S: Final = 60.0
"""What was tried and did not stay, or did not come, is let alone for this long."""
_FULL: Final = 0.7
"""Share of the host budget beyond which weights are read on demand only."""


class AdaptersAhead:
    """Chooses and follows the one adapter that is being brought closer.

    Args:
        known: can this id be loaded (was a request for it ever seen)?
        waits: does any request wait for its adapter?
        patience_s: longest time to wait for files.
    """

    def __init__(
        self,
        parts: AdapterParts,
        recorder: Recorder,
        *,
        known: Callable[[int], bool],
        waits: Callable[[], bool],
        patience_s: float,
    ) -> None:
        self._ledger = parts.ledger
        self._nodes = parts.nodes
        self._room = parts.room
        self._recorder = recorder
        self._known = known
        self._waits = waits
        self._patience_s = patience_s
        self._current: int | None = None
        self._since = 0.0
        self._next_look = 0.0
        self._tried: dict[int, float] = {}
        self._brought: set[int] = set()

    @property
    def current(self) -> int | None:
        """The adapter being brought closer, while no request has asked for it."""
        return self._current

    def step(self, now: float) -> None:
        """Once a step, before its orders are shipped."""
        if self._current is not None:
            self._follow(self._ledger.places[self._current], now)
        elif now >= self._next_look and self._ledger.quiet:
            self._next_look = now + _EVERY_S
            if not self._waits():
                self._begin(now)

    def removed(self, lora_id: int) -> None:
        """The operator took it out: it does not come back before a request asks for it."""
        self._tried[lora_id] = math.inf

    def used(self, lora_id: int) -> None:
        """A request for this adapter has come."""
        self._tried.pop(lora_id, None)
        if lora_id in self._brought:
            self._brought.discard(lora_id)
            if self._ledger.usable(lora_id):
                self._recorder.add("adapter_prefetches_used")
        if lora_id == self._current:
            self._current = None  # from here on it is the request's affair

    # ---- inside ----------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        entry = self._best(now)
        if entry is None:
            self._next_look = now + _NOTHING_S
            return
        self._tried[entry.lora_id] = now
        self._current, self._since = entry.lora_id, now
        if entry.in_host:
            self._place(entry)
        else:
            self._ledger.read_ahead(entry.lora_id)

    def _best(self, now: float) -> Entry | None:
        """The most valuable adapter that there is a free place for."""
        places = self._ledger.places
        slot, host = places.free_slots > 0, places.free_host
        if not (slot or host):
            return None
        found = [
            entry
            for entry in places
            if not entry.has_slot
            and (slot if entry.in_host else host and self._fits(entry))
            and self._worth_it(entry, now)
        ]
        best = self._nodes.rank([entry.lora_id for entry in found], now)
        return places[best[-1]] if best else None

    def _worth_it(self, entry: Entry, now: float) -> bool:
        node = self._nodes.node(entry.lora_id)
        if node is None or entry.order is not None or not self._known(entry.lora_id):
            return False
        last_try = self._tried.get(entry.lora_id, -_RETRY_S)
        return now - node.last_use < _RECENT_S and now - last_try >= _RETRY_S

    def _fits(self, entry: Entry) -> bool:
        used = self._room.budget - self._room.free
        return used + self._nodes.nbytes(entry.lora_id) <= _FULL * self._room.budget

    def _follow(self, entry: Entry, now: float) -> None:
        order = entry.order
        if order is None:
            self._current = None
            if entry.in_host and not entry.has_slot:
                self._place(entry)
        elif order.read and not order.granted:
            self._settle(entry)
        elif not order.granted and now - self._since >= self._patience_s:
            self._give_up(entry)

    def _settle(self, entry: Entry) -> None:
        if self._fits(entry) and self._ledger.settle_in(entry.lora_id):
            self._count(entry, Tier.HOST)
        else:
            self._give_up(entry)

    def _place(self, entry: Entry) -> None:
        if self._ledger.move_in(entry.lora_id):
            self._count(entry, Tier.GPU)
        else:
            self._current = None

    def _give_up(self, entry: Entry) -> None:
        self._ledger.cancel(entry.lora_id)
        self._current = None

    def _count(self, entry: Entry, tier: Tier) -> None:
        self._brought.add(entry.lora_id)
        self._recorder.add("adapter_prefetches", 1, tier.name.lower())
